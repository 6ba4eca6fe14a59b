"""Compares what was built with the model as transformers runs it, before anybody is served.

Random sequences run through the untouched module, each alone; later a stack runs them packed, paged, and cut in two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.attention.base import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.kv_cache import KVCache
from serve_app.model.stack import Stack

_LENGTHS = (13, 21)


@dataclass(frozen=True, slots=True)
class Probe:
    """ids: int64 [n] each; expected: logits [n, vocab_size] of the untouched module, float32 or float64."""

    ids: list[Tensor]
    expected: list[Tensor]

    @classmethod
    def of(cls, module: Any, name: str) -> "Probe":
        """Run the module, with transformers' own attention. Raises ConfigError when its logits are not finite."""
        device = next(module.parameters()).device
        module.config._attn_implementation = "eager"
        width = module.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(0, width, (length,), generator=generator).to(device) for length in _LENGTHS]
        logits = [module(input_ids=row[None], use_cache=False).logits[0] for row in ids]
        if not all(bool(torch.isfinite(row).all()) for row in logits):
            raise ConfigError(f"model {name}: its weights give logits that are not finite; the files are damaged")
        return cls(ids, [row if row.dtype == torch.float64 else row.float() for row in logits])

    def difference(self, stack: Stack, layers: Sequence[AttentionLayer]) -> float:
        """Largest difference of the stack's logits from the expected ones, as a part of their standard deviation.

        The sequences run packed together: prompts first, then one more token of each.
        """
        size, device = stack.backend.block_size, self.ids[0].device
        blocks = [-(-row.shape[0] // size) for row in self.ids]
        tables = [range(1 + sum(blocks[:index]), 1 + sum(blocks[: index + 1])) for index in range(len(blocks))]
        cache = KVCache(stack.backend, layers, 1 + sum(blocks), stack.cache_dtype, device)
        stack.attach(cache.layers)
        got: list[list[Tensor]] = [[] for _ in self.ids]
        for low, high in ((0, -1), (-1, None)):
            parts = [torch.arange(row.shape[0])[low:high] for row in self.ids]
            counts = [part.shape[0] for part in parts]
            slots = [table[0] * size + part for table, part in zip(tables, parts, strict=True)]
            batch = AttentionBatch(
                query_starts=[sum(counts[:index]) for index in range(len(counts) + 1)],
                kv_lens=[int(part[-1]) + 1 for part in parts],
                block_tables=block_matrix(tables),
                slot_mapping=torch.cat(slots).to(device),
            )
            packed = torch.cat([row[low:high] for row in self.ids])
            hidden = stack.forward(packed, torch.cat(parts).to(device), batch)
            for row, logits in enumerate(torch.split(stack.compute_logits(hidden), counts)):
                got[row].append(logits)
        stack.attach(None)
        differences = [
            float((torch.cat(parts) - reference).abs().max() / reference.std())
            for parts, reference in zip(got, self.expected, strict=True)
        ]
        # A difference that is no number must not lose against one that is.
        return float(torch.tensor(differences).max())
