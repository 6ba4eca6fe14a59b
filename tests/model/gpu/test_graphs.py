"""Buckets and buffers of decode graphs; without a GPU the same buffers are computed without a graph."""

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.attention.base import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.loader import from_module
from tests.model.gpu.fake_cuda import FakeCuda
from tests.models import tiny_model

PAGE = 16
LAYER = AttentionLayer(4, 2, 64, 64, 0.125)


@pytest.fixture
def step(device: torch.device):  # type: ignore[no-untyped-def]
    """Rows as (kv_len, block table) -> what a step passes on; each row's token stands at its last position."""
    from serve_app.model.gpu.attention import TritonAttention

    def step(rows: Sequence[tuple[int, list[int]]]):  # type: ignore[no-untyped-def]
        slots = [table[(length - 1) // PAGE] * PAGE + (length - 1) % PAGE for length, table in rows]
        batch = AttentionBatch(
            list(range(len(rows) + 1)),
            [length for length, _ in rows],
            block_matrix([table for _, table in rows]),
            torch.tensor(slots, device=device),
        )
        ids = torch.arange(100, 100 + len(rows), device=device)
        positions = torch.tensor([length - 1 for length, _ in rows], device=device)
        return ids, positions, TritonAttention().build(batch)

    return step


def test_every_row_arrives_and_padding_touches_nothing(step, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    """Long tables before short ones, many rows before few: nothing of an earlier step may show."""
    from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
    from serve_app.model.gpu.graphs import DecodeGraphs, Recorder

    seen = []

    def run(input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        seen.append((input_ids.shape[0], metadata))
        first_block = metadata.tables[:, 0]
        return torch.stack([input_ids, positions, metadata.slots, metadata.kv_lens, first_block], dim=1)

    graphs = DecodeGraphs(run, Recorder(device), TritonAttention(), 200, device)
    for rows in (
        [(100, list(range(3, 10))), (17, [2, 1]), (1, [11]), (33, [12, 13, 14]), (16, [15])],
        [(18, [2, 1]), (2, [11]), (34, [12, 13, 14])],
        [(1, [4])],
    ):
        inputs = step(rows)
        assert graphs.takes(inputs[2])
        got = graphs(*inputs)
        slots = inputs[2].slots.tolist()
        expected = [[100 + i, n - 1, slots[i], n, table[0]] for i, (n, table) in enumerate(rows)]
        assert got.tolist() == expected
        bucket, metadata = seen[-1]
        assert bucket == {5: 8, 3: 4, 1: 1}[len(rows)]
        assert metadata.kv_lens[len(rows) :].tolist() == [0] * (bucket - len(rows))
        assert metadata.slots[len(rows) :].tolist() == [-1] * (bucket - len(rows))
        (tiles,) = metadata.tiles(LAYER, torch.float32)
        assert tiles.rows.tolist() == list(range(bucket))


def test_prefill_and_huge_batches_are_not_taken(step, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.graphs import BUCKETS, DecodeGraphs, Recorder

    graphs = DecodeGraphs(lambda *inputs: inputs[0], Recorder(device), TritonAttention(), 64, device)
    slots = torch.tensor([16, 17, 32], device=device)
    assert not graphs.takes(TritonAttention().build(AttentionBatch([0, 2, 3], [2, 1], block_matrix([[1], [2]]), slots)))
    assert graphs.takes(step([(1, [1])] * BUCKETS[-1])[2])
    assert not graphs.takes(step([(1, [1])] * (BUCKETS[-1] + 1))[2])


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_what_a_captured_step_reads_outlives_its_capture(fake_cuda: FakeCuda) -> None:
    """Its tiles are made while it is captured, and the graph knows only their addresses."""
    from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
    from serve_app.model.gpu.graphs import DecodeGraphs, Recorder

    read = []

    def run(input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        for tiles in metadata.tiles(LAYER, torch.float32):
            read.extend([weakref.ref(tiles.rows), weakref.ref(tiles.firsts)])
        return input_ids + 1

    graphs = DecodeGraphs(run, Recorder(torch.device("cuda")), TritonAttention(), 200, torch.device("cpu"))
    for bucket in (4, 2):
        graphs.captured(bucket)
    gc.collect()
    assert read
    assert all(tensor() is not None for tensor in read)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_an_error_inside_a_capture_ends_it(fake_cuda: FakeCuda, in_pieces: bool, broken: bool) -> None:
    """And the next capture has a pool and a stream of its own, should this end fail as well."""
    from serve_app.model.gpu.graphs import Recorder

    recorder, calls = Recorder(torch.device("cuda")), []

    def call(*between: Callable[[Callable[[], None]], None]) -> Tensor:
        calls.append(between)
        for live in between:
            live(lambda: None)
        if len(calls) == 2:
            fake_cuda.broken = broken
            raise ValueError("not while capturing")
        return torch.ones(1)

    record = recorder.pieces if in_pieces else recorder.whole
    with pytest.raises(ValueError, match="not while capturing"):
        record(call)  # type: ignore[arg-type]
    assert not fake_cuda.capturing
    fake_cuda.broken = False
    assert record(call)().tolist() == [1.0]  # type: ignore[arg-type]
    assert len(calls) == 4


def test_mixed_steps_call_attention_between_the_pieces(step, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    from serve_app.model.gpu.graphs import MixedGraphs, Recorder

    sizes = []

    def run(ids: Tensor, positions: Tensor, slots: Tensor, attend, query: Tensor, out: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        sizes.append(ids.shape[0])
        query[:, 0, 0] = ids
        attend(7, query, out)
        return torch.stack([out[:, 0, 0].long(), positions, slots], dim=1)

    def attend(layer: int, query: Tensor, out: Tensor, metadata: object) -> None:
        seen.append((layer, metadata))
        out.copy_(query + 1)

    graphs = MixedGraphs(run, attend, Recorder(device), LAYER, torch.float32, device)
    for lengths in (range(1, 20), (5, 9)):
        seen: list[tuple[int, object]] = []
        ids, positions, metadata = step([(length, [1, 2]) for length in lengths])
        assert graphs.takes(metadata)
        got = graphs(ids, positions, metadata)
        assert got.tolist() == torch.stack([ids + 1, positions, metadata.slots], dim=1).tolist()
        assert seen[-1] == (7, metadata)
        assert sizes[-1] == {19: 32, 2: 16}[len(lengths)]
        assert (graphs._slots[len(lengths) : sizes[-1]] == -1).all()


def test_an_engine_on_graphs_gives_the_models_tokens(device: torch.device) -> None:
    """All sizes that its seats need are run before the first request; then batches shrink from size to size."""
    from serve_app.model.gpu.decoder import GpuDecoder

    module = tiny_model("qwen3", torch.float32).to(device)
    model = from_module(module, attention_backend="triton", max_model_len=64)
    stages: list[str] = []
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=3, kv_cache_gib=0.01)
    core = EngineCore(model, config, on_progress=stages.append)
    assert stages[-1].startswith("capturing graphs: ")
    decoder = model.executor
    assert isinstance(decoder, GpuDecoder)
    assert decoder._decode is not None
    assert decoder._sampling is not None
    captured = [dict(graphs._calls) for graphs in (decoder._decode, decoder._sampling)]
    assert [list(calls) for calls in captured] == [[4, 2, 1]] * 2
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12), (13,)]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=2 + 2 * index, ignore_eos=True)
        core.add(EngineRequest(str(index), prompt, params))
    got: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    while core.has_unfinished:
        for delta in core.step() or ():
            got[delta.request_id] += delta.token_ids
    assert [graphs._calls for graphs in (decoder._decode, decoder._sampling)] == captured
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=device)
        out = module.generate(ids, max_new_tokens=2 + 2 * index, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert got[str(index)] == out[0, len(prompt) :].tolist()
