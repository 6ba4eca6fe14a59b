"""Attention by Triton against the reference, on pools that hold NaN wherever no key of a row is."""

from collections.abc import Sequence
from functools import partialmethod
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from serve_app.model.attention import selection
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache, block_matrix

pytestmark = pytest.mark.wide

PAGE = 16
ROWS = [(0, 1), (16, 1), (0, 33), (63, 1), (17, 40), (64, 1), (5, 3), (130, 1), (31, 5), (0, 2)]
"""(keys in the pool before the step, queries of the step) of each row: decode rows between chunks
of prompts."""

LAYERS = {
    "group of 2": AttentionLayer(4, 2, 64, 64, 0.125),
    "group of 4, wide heads": AttentionLayer(8, 2, 128, 128, 128**-0.5),
    "group of 3": AttentionLayer(6, 2, 64, 64, 0.2),
    "no group": AttentionLayer(2, 2, 128, 128, 0.1),
    "group of 20": AttentionLayer(20, 1, 32, 32, 0.2),
    "odd widths": AttentionLayer(4, 2, 80, 48, 0.1),
    "window": AttentionLayer(4, 2, 64, 64, 0.125, sliding_window=40),
    "narrow window": AttentionLayer(4, 1, 64, 64, 0.125, sliding_window=3),
    "softcap": AttentionLayer(4, 2, 64, 64, 0.125, softcap=5.0),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Step:
    """One step's inputs, and the pool before it, for any backend."""

    def __init__(
        self, layer: AttentionLayer, rows: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(len(rows))
        counts = [count for _, count in rows]
        self.layer, self.dtype, self.device = layer, dtype, device
        lengths = [before + count for before, count in rows]
        needed = [-(-length // PAGE) for length in lengths]
        order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
        tables = [order[end - size : end] for size, end in zip(needed, accumulate(needed), strict=True)]
        slots = [
            [table[position // PAGE] * PAGE + position % PAGE for position in range(length)]
            for table, length in zip(tables, lengths, strict=True)
        ]
        self.old = [slot for line, (before, _) in zip(slots, rows, strict=True) for slot in line[:before]]
        new = [slot for line, (before, _) in zip(slots, rows, strict=True) for slot in line[before:]]
        self.num_blocks = 1 + sum(needed)
        self.batch = AttentionBatch(
            [0, *accumulate(counts)], lengths, block_matrix(tables), torch.tensor(new, device=device)
        )

        def draw(count: int, heads: int, dim: int) -> Tensor:
            return torch.randn(heads, count, dim, generator=generator).to(device, dtype)

        heads = layer.num_kv_heads
        self.history = (draw(len(self.old), heads, layer.head_dim), draw(len(self.old), heads, layer.value_dim))
        self.query = draw(sum(counts), layer.num_heads, layer.head_dim)
        self.new = (draw(sum(counts), heads, layer.head_dim), draw(sum(counts), heads, layer.value_dim))

    def run(self, name: str, padding: int = 0) -> tuple[Tensor, LayerCache]:
        """Output [tokens + padding, heads, dim] and the pool afterwards, as [slots, heads, dim]."""
        backend = selection._BACKENDS[name]()
        cache = backend.allocate(self.layer, self.num_blocks, self.dtype, self.device)
        by_slot = [pool if name == "reference" else pool.transpose(1, 2) for pool in cache]
        old = torch.tensor(self.old, dtype=torch.int64, device=self.device)
        for pool, past in zip(by_slot, self.history, strict=True):
            pool[1:] = float("nan")
            pool[old // PAGE, old % PAGE] = past.transpose(0, 1)
        query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (self.query, *self.new))
        out = backend.forward(self.layer, query, key, value, cache, backend.build(self.batch))
        return out, LayerCache(*(pool.flatten(0, 1) for pool in by_slot))


def largest_difference(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max())


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_agrees_with_the_reference(layer: AttentionLayer, device: torch.device) -> None:
    step = Step(layer, ROWS, torch.float32, device)
    (got, pool), (expected, expected_pool) = step.run("triton"), step.run("reference")
    assert largest_difference(got, expected) <= TOLERANCE[torch.float32]
    for ours, theirs in zip(pool, expected_pool, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as if they were integers")
    step = Step(LAYERS["group of 4, wide heads"], ROWS, dtype, device)
    assert largest_difference(step.run("triton")[0], step.run("reference")[0]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("name", ["group of 4, wide heads", "window", "softcap"])
def test_sinks_are_one_more_score(keys: int, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts, and of rows whose keys are split: only one split adds it."""
    from serve_app.model.gpu import attention

    step = Step(LAYERS[name], [*ROWS, (400, 1)], torch.float32, device)
    without = step.run("reference")[0]
    sinks = torch.randn(step.layer.num_heads, generator=torch.Generator().manual_seed(1)).to(device) + 1
    monkeypatch.setattr(attention, "_split_keys", lambda rows, layer: keys)
    attend = attention.TritonAttention.attend
    monkeypatch.setattr(attention.TritonAttention, "attend", partialmethod(attend, sinks=sinks))
    got = step.run("triton")[0]
    softmax = torch.softmax

    def with_sinks(scores: Tensor, dim: int) -> Tensor:
        more = sinks[:, None, None].expand(-1, scores.shape[1], 1)
        return softmax(torch.cat([scores, more], dim), dim=dim)[..., :-1]

    monkeypatch.setattr(torch, "softmax", with_sinks)
    expected = step.run("reference")[0]
    assert largest_difference(got, expected) <= TOLERANCE[torch.float32]
    assert largest_difference(without, expected) > 0.1


def test_padding_is_finite_and_written_nowhere(device: torch.device) -> None:
    step = Step(LAYERS["group of 2"], ROWS[2:6], torch.float32, device)
    (got, pool), (expected, expected_pool) = step.run("triton", padding=3), step.run("triton")
    assert torch.equal(got[:-3], expected)
    assert torch.isfinite(got).all()
    assert torch.equal(pool.key.nan_to_num(), expected_pool.key.nan_to_num())


@pytest.mark.parametrize("keys", [16, 64, 200])
@pytest.mark.parametrize("name", ["group of 4, wide heads", "window", "group of 3", "odd widths"])
def test_however_keys_are_split(keys: int, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few and of many splits, of one query and of some, more splits than are summed up at
    once; more parts than there are key tiles too."""
    from serve_app.model.gpu import attention

    monkeypatch.setattr(attention, "_split_keys", lambda rows, layer: keys)
    step = Step(LAYERS[name], [(0, 1), (129, 1), (17, 40), (400, 1), (200, 3)], torch.float32, device)
    assert largest_difference(step.run("triton")[0], step.run("reference")[0]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["group of 4, wide heads", "narrow window"])
def test_few_neighbours_do_not_change_how_a_row_is_split(name: str, device: torch.device) -> None:
    """Nor do their lengths: the same bits alone, beside rows of other lengths and beside a
    prompt."""
    row, layer = (300, 1), LAYERS[name]
    alone = Step(layer, [row], torch.float32, device)
    expected = alone.run("triton")[0]
    for rows in ([row, *[(3, 1)] * 9], [row, (700, 1), (0, 1)], [row, (10, 60)]):
        step = Step(layer, rows, torch.float32, device)
        count = alone.batch.kv_lens[0] - 1
        step.query[:, :1] = alone.query
        for ours, theirs in zip((*step.new, *step.history), (*alone.new, *alone.history), strict=True):
            size = count if theirs.shape[1] == count else 1
            ours[:, :size] = theirs
        assert torch.equal(step.run("triton")[0][:1], expected)


def test_a_prompt_gives_the_same_bits_however_it_is_cut(device: torch.device) -> None:
    layer = LAYERS["group of 4, wide heads"]
    whole = Step(layer, [(0, 150)], torch.float32, device)
    expected, pool = whole.run("triton")
    table = whole.batch.block_tables[0]
    backend = selection._BACKENDS["triton"]()
    cache = backend.allocate(layer, whole.num_blocks, torch.float32, device)
    got = []
    for low, high in ((0, 37), (37, 102), (102, 150)):
        batch = AttentionBatch([0, high - low], [high], table[None], whole.batch.kv_slots[low:high])
        key, value = (x[:, low:high] for x in whole.new)
        got.append(backend.forward(layer, whole.query[:, low:high], key, value, cache, backend.build(batch)))
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize("window", [None, 300])
def test_each_rows_own_length_says_how_it_is_split(window: int | None, device: torch.device) -> None:
    """One long row beside many short ones is not walked by one program; a row of several queries
    that fill no tile is split too, and a prompt is not."""
    from serve_app.model.gpu.attention import TritonAttention

    layer = AttentionLayer(32, 8, 128, 128, 0.1, sliding_window=window)
    lengths = [1, 128, 129, 100_000, 0, 2000, 512]
    counts = [1, 1, 1, 1, 1, 3, 512]
    batch = AttentionBatch(
        [0, *accumulate(counts)], lengths, block_matrix([[0]] * 7), torch.zeros(1, dtype=torch.int64, device=device)
    )
    metadata = TritonAttention().build(batch)
    split, whole = metadata.tiles(layer, torch.bfloat16)
    expected = [1, 1, 2, 3, 1, 3, 0] if window else [1, 1, 2, 64, 1, 16, 0]
    assert split.firsts.diff().tolist() == expected
    assert split.rows[: sum(expected)].tolist() == [row for row, count in enumerate(expected) for _ in range(count)]
    assert (split.kept, whole.kept) == (12, 0)
    assert whole.rows.tolist() == [6] * 16
    assert sorted(whole.firsts.tolist()) == list(range(0, 512, 32))


@pytest.mark.parametrize(("rows", "splits"), [(8, 16), (16, 8), (32, 4), (33, 2)])
def test_many_rows_are_split_less(rows: int, splits: int, device: torch.device) -> None:
    from serve_app.model.gpu.attention import TritonAttention

    layer = AttentionLayer(32, 8, 128, 128, 0.1)
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = AttentionBatch(list(range(rows + 1)), [2000] * rows, block_matrix([[0]] * rows), slots)
    (tiles,) = TritonAttention().build(batch).tiles(layer, torch.bfloat16)
    assert tiles.firsts.diff().tolist() == [splits] * rows


def test_the_probe_takes_it(device: torch.device) -> None:
    layers = [LAYERS[name] for name in ("group of 3", "window", "softcap")]
    assert selection.pick_backend("triton", layers, torch.float32, device).name == "triton"
