"""The change of the model by a quantized mode: KL divergence, top-1 agreement, perplexity.

Both modes run on one text in windows of `--window` tokens, each position predicting the next token.
The text is the long descriptions of the installed packages, in order of their names, so that the
same environment gives the same figures.

    python -m load_tests.bench.quality --mode int8 --json FILE
"""

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from email.message import Message
from pathlib import Path

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, block_matrix
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from serve_app.workloads.machine import machine

MODES = {"int8": ModelOptions(quantization="int8"), "bfloat16": ModelOptions(dtype="bfloat16")}


@dataclass
class Quality:
    """Means over all positions, and the largest KL divergence.

    KL divergence: of the quantized model's distribution from the exact one's, in nats. `top1`:
    share of positions with the same likeliest token.
    """

    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    perplexity_exact: float
    perplexity_quantized: float


def corpus(model: str, num_tokens: int) -> list[int]:
    """Return the first `num_tokens` tokens of the text. Raises `ValueError` if it is shorter."""
    tokenizer = load_tokenizer(model)
    ids: list[int] = []
    names = sorted({dist.metadata["Name"] for dist in importlib.metadata.distributions()}, key=str.lower)
    for name in names:
        metadata = importlib.metadata.metadata(name)
        assert isinstance(metadata, Message)  # its type hides it; the description is the body
        text = metadata.get_payload()
        if isinstance(text, str) and text.strip():
            ids += tokenizer.encode(text)
        if len(ids) >= num_tokens:
            return ids[:num_tokens]
    raise ValueError(f"the installed packages' descriptions have {len(ids)} tokens, not {num_tokens}")


def window_logits(model: PagedModel, ids: list[int]) -> Iterator[Tensor]:
    """Yield the logits of all positions, some rows at a time."""
    blocks = list(range(1, 2 + len(ids) // model.block_size))
    positions = torch.arange(len(ids))
    batch = AttentionBatch([0, len(ids)], [len(ids)], block_matrix([blocks]), positions + model.block_size)
    for rows in torch.split(model.forward(torch.tensor(ids), positions, batch), 128):
        yield model.compute_logits(rows)


def compare(exact: PagedModel, quantized: PagedModel, ids: list[int], window: int) -> Quality:
    """Run both modes over the text, window by window."""
    divergences, agreements, losses = [], [], []
    for model in (exact, quantized):
        model.allocate_kv_cache(2 + window // model.block_size)
    for start in range(0, len(ids) - 1, window):
        part, following = ids[start : start + window], torch.tensor(ids[start + 1 : start + window + 1])
        done = 0
        for ours, theirs in zip(window_logits(exact, part), window_logits(quantized, part), strict=True):
            targets = following[done : done + ours.shape[0]]
            done += ours.shape[0]
            p, q = (logits[: targets.shape[0]].log_softmax(-1) for logits in (ours, theirs))
            divergences.append((p.exp() * (p - q)).sum(-1))
            agreements.append(p.argmax(-1) == q.argmax(-1))
            losses.append(torch.stack([-x.gather(1, targets[:, None])[:, 0] for x in (p, q)]))
    divergence, loss = torch.cat(divergences), torch.cat(losses, dim=1).double().mean(1).exp()
    return Quality(
        positions=divergence.shape[0],
        kl_mean=float(divergence.double().mean()),
        kl_p99=float(divergence.quantile(0.99)),
        kl_max=float(divergence.max()),
        top1=float(torch.cat(agreements).double().mean()),
        perplexity_exact=float(loss[0]),
        perplexity_quantized=float(loss[1]),
    )


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--mode", choices=MODES, default="int8")
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    exact = load_model(ModelOptions(model=args.model, quantization="none"))
    quantized = load_model(replace(MODES[args.mode], model=args.model))
    with torch.inference_mode():
        quality = compare(exact, quantized, corpus(args.model, args.tokens), args.window)
    result = {"model": exact.name, "mode": args.mode, "window": args.window, **asdict(quality)}
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
