"""Packed, paged and chunked against the untouched transformers module run alone."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model.attention.base import AttentionBatch
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from tests.models import ARCHITECTURES, VOCAB_SIZE, tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Sequences:
    """Drives a `PagedModel` by hand: each sequence has its tokens, its blocks, and how far it is computed."""

    def __init__(self, model: PagedModel, tokens: Sequence[Tensor], tables: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.tokens = tokens
        self.tables = tables
        self.done = [0] * len(tokens)

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Compute the next counts[i] tokens of each sequence i, packed in this order; their logits."""
        size = self.model.block_size
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
            block_tables=[self.tables[index] for index in counts],
            slot_mapping=torch.tensor(slots),
        )
        logits = self.model.compute_logits(self.model.forward(torch.cat(ids), torch.tensor(positions), batch))
        return dict(zip(counts, logits.split(list(counts.values())), strict=True))


def random_tokens(length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_chunks_equal_the_module_run_alone(arch: str, backend: str) -> None:
    module = tiny_model(arch, torch.float64)
    model = from_module(module, attention_backend=backend)
    model.allocate_kv_cache(40)
    tokens = [random_tokens(length, seed) for seed, length in enumerate((70, 5, 33))]
    # One sequence in consecutive blocks, one alone in the middle, one backwards with gaps.
    sequences = Sequences(model, tokens, [range(1, 6), [20], [30, 28, 26]])
    got: list[list[Tensor]] = [[], [], []]
    for counts in ({0: 40, 1: 1}, {1: 3, 0: 1, 2: 20}, {2: 1, 0: 1, 1: 1}, {0: 28, 2: 12}):
        for index, logits in sequences.step(counts).items():
            got[index].append(logits)
    # Eager attention takes its softmax in float32, sdpa does not.
    sdpa = module.config._attn_implementation == "sdpa"
    with torch.no_grad():
        for row, parts in zip(tokens, got, strict=True):
            expected = module(input_ids=row[None]).logits[0]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-9 if sdpa else 1e-5)
