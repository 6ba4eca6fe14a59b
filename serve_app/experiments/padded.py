"""Padded static batches with transformers' own `generate`: the classic way to batch, and the
baseline of `compare`.

Each batch is left-padded to its longest prompt and runs to its longest output. A hook counts the
model's forward passes; they are not computed from the lengths.
"""

import contextlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.checkpoints.model_files import locate_model
from serve_app.observability.timeline import Span, Work


@dataclass(frozen=True, slots=True)
class PaddedRun:
    """Outputs (cut to each request's cap), seconds of generating, forward passes, and each slot's
    work in them.

    positions: positions computed by all forward passes, including padding.
    """

    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int
    positions: int
    spans: tuple[Span, ...]


def load_causal_lm(model: str, dtype: str, device: str) -> Any:
    """Load a causal LM of transformers with torch's own attention. model: any value of the setting
    `model`.

    dtype: name of a torch dtype; device: "auto", "cpu" or "cuda". Raises `ConfigError` for an
    unknown model.
    """
    files = locate_model(model)
    # The GGUF reader's progress bar cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            files.source,
            gguf_file=files.gguf_file,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return loaded.eval().to(device)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and mask, int64 [prompts, longest]. Padding is on the left, where the mask
    is 0.
    """
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    # The padding id does not matter: the mask hides it.
    ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
    return ids, torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])


_GREEDY: Mapping[str, Any] = {"do_sample": False}


class PaddedGenerator:
    """Runs a causal LM of transformers batch by batch; see `load_causal_lm`."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        self._model = load_causal_lm(model, dtype, device)
        # Without an end-of-sequence id every row runs to the batch's longest output, as with
        # `ignore_eos`.
        self._model.generation_config.eos_token_id = None

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        caps: Sequence[int],
        batch_size: int,
        on_step: Callable[[int], None] = lambda _: None,
        sampling: Mapping[str, Any] = _GREEDY,
    ) -> PaddedRun:
        """Generate for `batch_size` requests at a time, in the given order.

        prompts: token ids; caps: wanted output tokens of each; sampling: arguments of `generate`.
        `on_step` is called after each forward pass with the number of wanted tokens it produced.
        """
        outputs: list[tuple[int, ...]] = []
        spans: list[Span] = []
        steps = positions = 0
        started = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = range(first, min(first + batch_size, len(prompts)))
            batch_caps = [caps[index] for index in batch]
            rows, passes, computed = self._generate([prompts[index] for index in batch], batch_caps, on_step, sampling)
            outputs.extend(rows)
            for slot, index in enumerate(batch):
                spans.extend(_spans(slot, f"request-{index}", steps, caps[index], passes))
            steps += passes
            positions += computed
        return PaddedRun(tuple(outputs), time.perf_counter() - started, steps, positions, tuple(spans))

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        caps: Sequence[int],
        on_step: Callable[[int], None],
        sampling: Mapping[str, Any],
    ) -> tuple[list[tuple[int, ...]], int, int]:
        """Run one batch. Return its outputs, the number of forward passes, and the positions they
        computed.
        """
        ids, mask = left_padded(prompts)
        width = ids.shape[1]
        passes = positions = 0

        def count(_module: object, _args: object, inputs: dict[str, Any], _output: object) -> None:
            nonlocal passes, positions
            passes += 1
            positions += inputs["input_ids"].numel()
            on_step(sum(cap >= passes for cap in caps))

        hook = self._model.register_forward_hook(count, with_kwargs=True)
        try:
            rows = self._model.generate(
                input_ids=ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(caps),
                pad_token_id=0,
                **sampling,
            )
        finally:
            hook.remove()
        outputs = [tuple(row[width : width + cap].tolist()) for row, cap in zip(rows, caps, strict=True)]
        return outputs, passes, positions


def _spans(slot: int, request_id: str, start: int, cap: int, passes: int) -> list[Span]:
    """Return the work of one row of a padded batch: its prompt, its own tokens, then padding to the
    end of the batch.
    """
    borders = [(start, start + 1, Work.PREFILL), (start + 1, start + cap, Work.DECODE)]
    borders.append((start + cap, start + passes, Work.WASTED))
    return [Span(slot, begin, end, request_id, 0, work) for begin, end, work in borders if end > begin]
