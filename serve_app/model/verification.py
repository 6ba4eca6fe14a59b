"""Compares an executor with the model run by transformers, before serving.

The unchanged module runs random sequences one by one. Then an executor runs them packed, paged, and
split in two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.errors import ConfigError, one_line
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.executor import ModelExecutor, UnsupportedModelError
from serve_app.model.kv_cache import KVCache

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest accepted `ReferenceLogits.difference` between an executor and the module.

(transformers computes softmax and norms in float32 for every dtype. Its own two attention
implementations differ by 0.11 in bfloat16 on random weights of the shape of Llama 3.1 8B. On a
small random model, missing positions give 0.9, and an attention scale of 0.7 times the correct one
gives 0.4.)
"""

_LENGTHS = {"cpu": (13, 21), "cuda": (13, 21, 600)}
"""Tokens of the sequences, by device. A long sequence tests kernels that tile and split keys. On a
CPU it would slow the start more than it is worth.
"""


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Logits of the unchanged module. ids: int64 [n] per sequence; logits: [n, vocab_size], float32
    or float64.
    """

    ids: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def compute(cls, module: Any, name: str, max_model_len: int) -> "ReferenceLogits":
        """Run the module, with transformers' own attention, on sequences of up to `max_model_len`
        tokens.

        Raises UnsupportedModelError if the module fails, ConfigError if its logits are not finite.
        """
        device = next(module.parameters()).device
        module.config._attn_implementation = "eager"
        width = module.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        lengths = [max(2, min(length, max_model_len)) for length in _LENGTHS[device.type]]
        usual = torch.tensor(sorted({*range(width)} - {*_ids_of_media(module.config)}))
        ids = [usual[torch.randint(0, len(usual), (length,), generator=generator)].to(device) for length in lengths]
        try:
            logits = [module(input_ids=row[None], use_cache=False).logits[0] for row in ids]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as shapes that do not fit each other
            if _needs_cache(module, ids[0]):
                raise UnsupportedModelError("its layers need transformers' own cache (`use_cache`)") from error
            raise UnsupportedModelError(f"its configuration cannot be computed: {one_line(error)}") from error
        if not all(bool(torch.isfinite(row).all()) for row in logits):
            raise not_finite(name)
        return cls(ids, [row if row.dtype == torch.float64 else row.float() for row in logits])

    def difference(self, executor: ModelExecutor, layers: Sequence[AttentionLayer], *, typical: bool = False) -> float:
        """Return the difference of the executor's logits from these: the standard deviation of a
        token's logit differences, for the worst token (or, `typical`, the median one), relative to
        the standard deviation of these logits.

        (An offset common to all logits of a token changes no probability, and with 8 bits it can be
        most of the difference. The maximum difference would grow with the vocabulary, whatever its
        cause.)
        """
        differences = torch.cat(
            [
                (got - reference).std(-1, correction=0) / reference.std()
                for got, reference in zip(_run(executor, self.ids, layers), self.logits, strict=True)
            ]
        )
        # Both return NaN if any difference is NaN.
        return float(differences.median() if typical else differences.max())


def _ids_of_media(config: Any) -> frozenset[int]:
    """Return the ids that a wrapper's configuration gives to images, sound and other special
    tokens, in whose place its module may put something else than their embedding.
    """
    if config.get_text_config() is config:
        return frozenset()
    values = [value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index"))]
    return frozenset(value for value in values if type(value) is int)


def _needs_cache(module: Any, ids: Tensor) -> bool:
    """Whether a module that fails without a cache runs with one."""
    try:
        module(input_ids=ids[None], use_cache=True)
    except Exception:  # transformers' modules may raise anything
        return False
    return True


def _run(executor: ModelExecutor, ids: Sequence[Tensor], layers: Sequence[AttentionLayer]) -> list[Tensor]:
    """Return the logits [n, vocab_size] of sequences of token ids int64 [n]. The sequences run
    packed: prompts first, then one more token of each.
    """
    size, device = executor.backend.block_size, ids[0].device
    blocks = [-(-row.shape[0] // size) for row in ids]
    tables = [range(1 + sum(blocks[:index]), 1 + sum(blocks[: index + 1])) for index in range(len(blocks))]
    cache = KVCache(executor.backend, layers, 1 + sum(blocks), executor.cache_dtype, device)
    executor.attach(cache.layers)
    got: list[list[Tensor]] = [[] for _ in ids]
    for low, high in ((0, -1), (-1, None)):
        parts = [torch.arange(row.shape[0])[low:high] for row in ids]
        counts = [part.shape[0] for part in parts]
        slots = [table[0] * size + part for table, part in zip(tables, parts, strict=True)]
        batch = AttentionBatch(
            query_starts=[sum(counts[:index]) for index in range(len(counts) + 1)],
            kv_lens=[int(part[-1]) + 1 for part in parts],
            block_tables=block_matrix(tables),
            kv_slots=torch.cat(slots).to(device),
        )
        packed = torch.cat([row[low:high] for row in ids])
        hidden = executor.forward(packed, torch.cat(parts).to(device), batch)
        for row, logits in enumerate(torch.split(executor.compute_logits(hidden), counts)):
            got[row].append(logits)
    executor.attach(None)
    return [torch.cat(parts) for parts in got]


def check_finite(executor: ModelExecutor, name: str, vocab_size: int, layers: Sequence[AttentionLayer]) -> None:
    """Raise ConfigError if the logits of two tokens are not finite."""
    ids = torch.tensor([0, vocab_size - 1])
    if not bool(torch.isfinite(_run(executor, [ids], layers)[0]).all()):
        raise not_finite(name)


def not_finite(name: str) -> ConfigError:
    """Return the error for a model whose logits are not finite."""
    return ConfigError(f"model {name}: its weights give logits that are not finite; the files are damaged")


def verify_model(
    executor: ModelExecutor,
    reference: ReferenceLogits,
    layers: Sequence[AttentionLayer],
    tolerance: float,
    *,
    typical: bool = False,
) -> None:
    """Raise UnsupportedModelError if the executor's logits differ from the reference by more than
    `tolerance`; see `ReferenceLogits.difference`.
    """
    difference = reference.difference(executor, layers, typical=typical)
    if not difference <= tolerance:
        raise UnsupportedModelError(f"its logits would differ by {difference:.2g} standard deviations")
