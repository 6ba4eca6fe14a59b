"""Drives a `PagedModel` by hand, step by step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, block_matrix
from serve_app.model.paged_model import PagedModel


class Sequences:
    """Drives a `PagedModel` by hand: each sequence has its tokens, its blocks, and how far it is
    computed."""

    def __init__(self, model: PagedModel, tokens: Sequence[Tensor], tables: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.tokens = tokens
        self.tables = tables
        self.done = [0] * len(tokens)

    def step(self, counts: dict[int, int], wanted: npt.NDArray[np.bool_] | None = None) -> dict[int, Tensor]:
        """Compute the next counts[i] tokens of each sequence i, packed in this order; their logits,
        if `wanted`."""
        size, device = self.model.block_size, self.model.device
        starts, slots, ids, positions = [0], [], [], []
        for index, count in counts.items():
            span = range(self.done[index], self.done[index] + count)
            starts.append(starts[-1] + count)
            slots += [self.tables[index][position // size] * size + position % size for position in span]
            ids.append(self.tokens[index][span.start : span.stop])
            positions += list(span)
            self.done[index] = span.stop
        batch = AttentionBatch(
            query_starts=starts,
            kv_lens=[self.done[index] for index in counts],
            block_tables=block_matrix([self.tables[index] for index in counts]),
            kv_slots=torch.tensor(slots, device=device),
            wanted=wanted,
        )
        packed = torch.cat(ids).to(device), torch.tensor(positions, device=device)
        logits = self.model.compute_logits(self.model.forward(*packed, batch))
        return dict(zip(counts, logits.split(list(counts.values())), strict=True))


def random_tokens(length: int, seed: int, vocab_size: int = 200) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
