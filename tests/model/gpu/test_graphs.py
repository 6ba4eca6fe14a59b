"""Buckets and buffers of decode graphs; without a GPU the same buffers are computed without a
graph."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from serve_app import grammars
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.input_batch import InputBatch, PackedBatch
from serve_app.model.loader import from_module
from serve_app.model.sampling import grammar_masks
from serve_app.model.slot_memory import SlotMemory
from tests.engine.harness import Harness
from tests.engine.test_constrained import VOCABULARY
from tests.model.gpu.fake_cuda import FakeCuda
from tests.models import tiny_model

pytestmark = pytest.mark.wide

PAGE = 16
LAYER = AttentionLayer(4, 2, 64, 64, 0.125)


LENGTH = 200
"""Of the longest context."""


class Steps:
    """The host's batch and the device's memory of six slots, and decode steps over them."""

    def __init__(self, device: torch.device) -> None:
        self.batch = InputBatch(6, LENGTH, PAGE)
        self.memory = SlotMemory(6, LENGTH, PAGE, device, keeps_tables=True)

    def decode(self, rows: Sequence[tuple[int, int, list[int]]], *, in_flight: bool = False) -> PackedBatch:
        """Rows as (slot, kv_len, block table): new sequences, each at its last token, whose id is
        its length."""
        starts = [
            SlotStart(slot, "", 0, tuple(range(1, length + 1)), length, SamplingParams(seed=slot), tuple(table))
            for slot, length, table in rows
        ]
        plan = [
            ScheduledRequest(slot, "", 0, length - 1, 1, (), True, False, token_in_flight=in_flight)
            for slot, length, _ in rows
        ]
        self.batch.apply(SchedulerOutput(0, tuple(plan), tuple(starts), (), len(plan)))
        for start in starts:
            self.memory.start(start)
        return self.batch.pack(plan)


@pytest.fixture
def steps(device: torch.device) -> Steps:
    return Steps(device)


def first_token(hidden: Tensor, params: Tensor) -> Tensor:
    return hidden[:, 0] + 1000


def test_every_row_arrives_and_padding_touches_nothing(steps: Steps, device: torch.device) -> None:
    """Long tables before short ones, many rows before few: nothing of an earlier step may show."""
    if device.type == "cuda":
        pytest.skip("a captured step runs no Python, by which noise is looked at here")
    from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
    from serve_app.model.gpu.graphs import DecodeGraphs, Recorder

    seen = []

    def run(input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        seen.append((input_ids.shape[0], metadata))
        first_block = metadata.tables[metadata.table_lines.long(), 0]
        return torch.stack([input_ids, positions, metadata.slots, metadata.kv_lens, first_block], dim=1)

    def choose(hidden: Tensor, params: Tensor) -> Tensor:
        noise.append(params[:, -1].tolist())
        return first_token(hidden, params)

    noise: list[list[float]] = []
    example = torch.zeros(1, 5, dtype=torch.int64, device=device)
    graphs = DecodeGraphs(run, choose, Recorder(device), TritonAttention(), LENGTH, steps.memory, example)
    for rows in (
        [(4, 100, list(range(3, 10))), (0, 17, [2, 1]), (5, 1, [11]), (1, 33, [12, 13, 14]), (3, 16, [15])],
        [(1, 18, [2, 1]), (0, 2, [11]), (2, 34, [12, 13, 14])],
        [(3, 1, [4])],
    ):
        packed = steps.decode(rows)
        assert graphs.takes(packed)
        decoded = graphs(packed)
        history = steps.memory.history.clone()
        expected = [[n, n - 1, table[(n - 1) // PAGE] * PAGE + (n - 1) % PAGE, n, table[0]] for _, n, table in rows]
        assert decoded.hidden.tolist() == expected
        bucket, metadata = seen[-1]
        assert bucket == {5: 8, 3: 4, 1: 1}[len(rows)]
        assert metadata.kv_lens[len(rows) :].tolist() == [0] * (bucket - len(rows))
        assert metadata.slots[len(rows) :].tolist() == [-1] * (bucket - len(rows))
        (tiles,) = metadata.tiles(LAYER, torch.float32)
        assert tiles.firsts.tolist() == list(range(bucket + 1))
        assert decoded.choose().resolve().token_ids == [1000 + n for _, n, _ in rows]
        assert noise[-1] == [*packed.sampling.parameters[:, -1], *[0.0] * (bucket - len(rows))]
        for slot, n, _ in rows:
            history[slot, n] = 1000 + n
        assert torch.equal(steps.memory.history, history)


def test_what_only_the_device_knows_comes_from_there(steps: Steps, device: torch.device) -> None:
    """The last step's tokens, of which one failed; and blocks which only a token has told."""
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.graphs import DecodeGraphs, Recorder

    graphs = DecodeGraphs(
        lambda ids, positions, metadata: ids[:, None],
        lambda hidden, params: torch.where(hidden[:, 0] == 7, -1, hidden[:, 0] + 1000),
        Recorder(device), TritonAttention(), LENGTH, steps.memory, torch.zeros(1, 1, dtype=torch.int64, device=device),
    )  # fmt: skip
    graphs(steps.decode([(2, 16, [9]), (0, 7, [4]), (5, 40, [1, 2, 3])])).choose()
    plan = [
        ScheduledRequest(slot, "", 0, length, 1, blocks, True, False, token_in_flight=True)
        for slot, length, blocks in ((5, 40, ()), (2, 16, (8,)), (0, 7, ()))
    ]
    steps.batch.apply(SchedulerOutput(0, tuple(plan), (), (), 3))
    packed = steps.batch.pack(plan)
    assert packed.host[0].tolist() == [-1, -1, -1]
    assert graphs(packed).hidden[:, 0].tolist() == [1040, 1016, 0]
    assert steps.memory.tables is not None
    for line, table in zip(steps.memory.tables.tolist(), steps.batch._block_tables.tolist(), strict=True):
        assert line == table


def test_other_steps_are_not_taken(steps: Steps) -> None:
    """Chunks of prompts, drafts, a token after which nothing is sampled, more rows than any bucket
    has."""
    from serve_app.model.gpu.graphs import BUCKETS, DecodeGraphs

    packed = steps.decode([(0, 5, [1]), (1, 9, [2])])
    assert DecodeGraphs.takes(packed)
    first, second = packed.rows
    for other in (
        second._replace(start=7, num_tokens=2),
        second._replace(num_tokens=2, draft_token_ids=(3,)),
        second._replace(samples=False),
    ):
        assert not DecodeGraphs.takes(steps.batch.pack([first, other]))
    assert DecodeGraphs.takes(steps.batch.pack([first] * BUCKETS[-1]))
    assert not DecodeGraphs.takes(steps.batch.pack([first] * (BUCKETS[-1] + 1)))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_what_a_captured_step_reads_outlives_its_capture(steps: Steps, fake_cuda: FakeCuda) -> None:
    """The graph knows only addresses. Tiles depend on the step, so those that it reads are made by
    the graph itself, not by the run before it; buffers live as long as the call."""
    from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
    from serve_app.model.gpu.graphs import DecodeGraphs, Recorder

    made = []

    def run(input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        made.append((bool(fake_cuda.capturing), [id(tiles.rows) for tiles in metadata.tiles(LAYER, torch.float32)]))
        kept.append(metadata)
        return input_ids[:, None] + 1

    kept: list[object] = []
    example = torch.zeros(1, 1, dtype=torch.int64, device=steps.memory.history.device)
    recorder = Recorder(torch.device("cuda"))
    graphs = DecodeGraphs(run, first_token, recorder, TritonAttention(), LENGTH, steps.memory, example)
    buffers = [weakref.ref(buffer) for buffer in (graphs._buffer, graphs._kv_lens, graphs._table_lines, graphs._hidden)]
    calls = [graphs.captured(bucket) for bucket in (4, 2)]
    assert [capturing for capturing, _ in made] == [False, True] * 2
    assert len({number for _, numbers in made for number in numbers}) == 4
    del graphs
    gc.collect()
    assert calls
    assert all(buffer() is not None for buffer in buffers)


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


def test_mixed_steps_call_attention_between_the_pieces(device: torch.device) -> None:
    from serve_app.model.gpu.attention import TritonAttention
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
    for count in (19, 2):
        seen: list[tuple[int, object]] = []
        ids, positions = torch.arange(100, 100 + count, device=device), torch.arange(count, device=device)
        batch = AttentionBatch([0, count], [count], block_matrix([[1, 2]]), positions + PAGE)
        metadata = TritonAttention().build(batch)
        assert graphs.takes(metadata)
        got = graphs(ids, positions, metadata)
        assert got.tolist() == torch.stack([ids + 1, positions, metadata.slots], dim=1).tolist()
        assert seen[-1] == (7, metadata)
        assert sizes[-1] == {19: 32, 2: 16}[count]
        assert (graphs._slots[count : sizes[-1]] == -1).all()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_engine_on_graphs_gives_the_models_tokens(
    overlap: Literal["off", "on"], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sizes that its slots need are run before the first request; then batches shrink from size
    to size, rows grow into new blocks, one row is not plain, and a prompt comes from the prefix
    cache."""
    from serve_app.model.gpu import decoder as decoders
    from serve_app.model.gpu.decoder import GpuDecoder

    # Larger mixed steps than there can be here would take the interpreter most of the time.
    monkeypatch.setattr(decoders, "TOKEN_BUCKETS", (16, 32))
    module = tiny_model("qwen3", torch.float32).to(device)
    model = from_module(module, attention_backend="triton", max_model_len=64)
    stages: list[str] = []
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=3, kv_cache_gib=0.01, overlap=overlap)
    core = EngineCore(model, config, on_progress=stages.append)
    assert stages[-1].startswith("capturing graphs: ")
    decoder = model.executor
    assert isinstance(decoder, GpuDecoder)
    assert decoder._decode is not None
    captured = dict(decoder._decode._calls)
    assert list(captured) == [4, 2, 1]
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(range(20, 51)), (13,), tuple(range(20, 55))]
    lengths = (2, 4, 3, 3, 2)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0, max_tokens=lengths[index], ignore_eos=True, logprobs=2 if index == 1 else None
        )
        core.add(EngineRequest(str(index), prompt, params))
    got: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    while core.has_unfinished:
        for delta in core.step() or ():
            got[delta.request_id] += delta.token_ids
    assert decoder._decode._calls == captured
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=device)
        out = module.generate(ids, max_new_tokens=lengths[index], do_sample=False, eos_token_id=None, pad_token_id=0)
        assert got[str(index)] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_plain_rows_stay_in_the_sampling_graph_beside_others(
    overlap: Literal["off", "on"], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph samples all rows of a step; those with a grammar, penalties or log-probabilities
    are then sampled anew, and it is these tokens that the next step finds in the history."""
    from serve_app.model.gpu import decoder as decoders
    from serve_app.model.gpu import graphs, sampling

    monkeypatch.setattr(decoders, "TOKEN_BUCKETS", (16,))
    monkeypatch.setattr(grammar_masks, "_PATIENCE_S", 60.0)
    module = tiny_model("qwen3", torch.float32).to(device)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"ignore_eos": True},
        "constrained": {"grammar": grammars.regex("[a-z]{60,80}"), "logprobs": 1},
        "penalized": {"ignore_eos": True, "frequency_penalty": 1.5},
    }
    workload = [
        EngineRequest(name, (5, 6, 7 + i), SamplingParams(seed=i, max_tokens=4, **fields))
        for i, (name, fields) in enumerate(kinds.items())
    ]
    config: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "vocabulary": VOCABULARY,
        "speculation": "off",
    }
    plain_model = from_module(module, attention_backend="reference", max_model_len=64)
    expected = Harness(plain_model, overlap="off", **config).run(workload).outcomes
    model = from_module(module, attention_backend="triton", max_model_len=64)
    harness = Harness(model, overlap=overlap, **config)
    sampled: list[int] = []
    sample, chosen = sampling.sample, graphs.chosen
    graph_rows: list[int] = []
    monkeypatch.setattr(graphs, "chosen", lambda ids: (graph_rows.append(len(ids)), chosen(ids))[1])
    monkeypatch.setattr(
        sampling, "sample", lambda logits, *rest: (sampled.append(len(logits)), sample(logits, *rest))[1]
    )
    run = harness.run(workload)
    assert {key: outcome.token_ids for key, outcome in run.outcomes.items()} == {
        key: outcome.token_ids for key, outcome in expected.items()
    }
    assert [entry.token_id for entry in run.outcomes["constrained", 0].logprobs] == expected["constrained", 0].token_ids
    assert (graph_rows, sampled) == ([3] * 3, [3, *[2] * 3])
    assert len(run.records) == 4
