import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import ConfigError, InvalidRequestError
from serve_app.model import runner
from serve_app.model.input_batch import PackedBatch
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.model.pooling import Pooled
from serve_app.model.profiling import memory
from serve_app.model.profiling.limits import measure_limits
from serve_app.model.profiling.memory import GIB
from tests.engine.harness import Harness
from tests.models import needs_compiler, tiny_model


def make_request(name: str, length: int = 20, max_tokens: int = 4, **fields: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **fields)
    return EngineRequest(name, tuple(range(2, 2 + length)), params)


def test_the_pool_takes_what_the_cap_allows(tiny_llama: PagedModel) -> None:
    block = tiny_llama.kv_bytes_per_block()
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=100 * block / GIB))
    # the null block, and one that the runner keeps for itself
    assert core.stats().blocks_total == 98
    assert core.info.num_blocks == 99


def test_the_pool_takes_a_part_of_the_memory_that_is_left(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tiny_llama.kv_bytes_per_block()
    monkeypatch.setattr(memory, "available_memory", lambda device, gpu_share: 100 * block)
    core = EngineCore(tiny_llama, EngineConfig(memory_fraction=0.5, kv_cache_gib=1.0))
    assert core.info.num_blocks == 49


def test_a_pool_below_one_full_request_is_refused(tiny_llama: PagedModel) -> None:
    needed = tiny_llama.max_model_len // tiny_llama.block_size + 2
    enough = EngineConfig(kv_cache_gib=(needed + 0.5) * tiny_llama.kv_bytes_per_block() / GIB)
    core = EngineCore(tiny_llama, enough)
    core.add(make_request("full", length=100, max_tokens=tiny_llama.max_model_len - 100))
    too_small = EngineConfig(kv_cache_gib=(needed - 0.5) * tiny_llama.kv_bytes_per_block() / GIB)
    with pytest.raises(ConfigError, match=r"kv_cache_gib.*max_model_len 256"):
        EngineCore(tiny_llama, too_small)


def test_the_model_is_told_about_before_it_is_sized(tiny_llama: PagedModel) -> None:
    said: list[str] = []
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1), on_progress=said.append)
    assert said[0] == "warming up"
    assert str(core.info.num_blocks) in said[2]
    assert (core.info.vocab_size, core.info.max_model_len, core.info.device) == (200, 256, "cpu")
    assert core.info.eos_token_ids == (1,)


def test_automatic_slots_are_chosen_told_and_all_taken(tiny_llama: PagedModel) -> None:
    said: list[str] = []
    config = EngineConfig(kv_cache_gib=0.1, max_num_seqs=128, auto_slots=True)
    core = EngineCore(tiny_llama, config, on_progress=said.append)
    slots = core.info.max_num_seqs
    assert 16 <= slots <= 128
    assert core.config.max_num_seqs == slots
    assert any(line.startswith(f"max_num_seqs={slots} (") for line in said)
    for number in range(slots + 1):
        core.add(make_request(str(number), 1, 2))
    core.step()
    assert (core.stats().running, core.stats().waiting) == (slots, 1)


def test_what_drafts_cost_is_measured_and_told(tiny_llama: PagedModel) -> None:
    said: list[str] = []
    config = EngineConfig(kv_cache_gib=0.1, max_num_seqs=24, max_num_batched_tokens=48)
    cost = EngineCore(tiny_llama, config, on_progress=said.append)._scheduler.config.draft_cost
    assert str(cost) in said
    assert cost.rows == [1, 16, 24]
    assert all(seconds > 0 for seconds in (*cost.step_s, *cost.draft_s))


@pytest.mark.parametrize("slots", [{"auto_slots": True, "max_num_seqs": 256}, {"max_num_seqs": 200}])
def test_automatic_tokens_of_a_step_are_chosen_and_told(tiny_llama: PagedModel, slots: dict[str, Any]) -> None:
    said: list[str] = []
    records: list[StepRecord] = []
    config = EngineConfig(kv_cache_gib=0.1, max_num_batched_tokens=2048, auto_step_tokens=True, **slots)
    core = EngineCore(tiny_llama, config, on_progress=said.append, on_step=records.append)
    tokens = core.info.max_num_batched_tokens
    assert 128 <= tokens <= 2048
    assert core.info.max_num_seqs <= tokens // 2
    assert core.config.max_num_batched_tokens == tokens >= core.info.max_num_seqs
    assert any(line.startswith(f"max_num_batched_tokens={tokens} (") for line in said)
    for number in range(tokens // 190 + 1):
        core.add(make_request(str(number), 190, 2))
    core.step()
    assert records[0].num_prefill_tokens == tokens


def test_a_small_pool_has_no_more_than_the_fewest_automatic_slots(tiny_llama: PagedModel) -> None:
    """All of them take part in turns, as many as the pool holds, however long they become."""
    config = EngineConfig(kv_cache_gib=20 * tiny_llama.kv_bytes_per_block() / GIB, max_num_seqs=128, auto_slots=True)
    core = EngineCore(tiny_llama, config)
    assert core.info.max_num_seqs == 16
    for number in range(16):
        core.add(make_request(str(number), 20, 40))
    while core.has_unfinished:
        core.step()
    core.check_invariants()


def test_who_asks_is_told_that_the_model_is_next_also_when_there_is_nothing_to_run(tiny_llama: PagedModel) -> None:
    told: list[int] = []
    records: list[StepRecord] = []
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1), on_step=records.append)
    assert core.step(lambda: told.append(len(records))) is None
    core.add(make_request("a", 4, 2))
    while core.has_unfinished:
        core.step(lambda: told.append(len(records)))
    assert told == [0, 0, 1]


def test_a_step_leaves_a_record(tiny_llama: PagedModel) -> None:
    ticks = itertools.count(100)
    records: list[StepRecord] = []
    config = EngineConfig(kv_cache_gib=0.1, max_num_batched_tokens=32)
    core = EngineCore(tiny_llama, config, on_step=records.append, clock=lambda: float(next(ticks)))
    assert core.step() is None
    assert records == []
    core.add(make_request("a", 40, 2))
    core.add(make_request("b", 3, 2))
    while core.has_unfinished:
        core.step()
    assert [(r.num_prefill_tokens, r.num_decode_tokens, r.num_output_tokens) for r in records] == [
        (32, 0, 0),
        (11, 0, 2),
        (0, 2, 2),
    ]
    assert [r.step for r in records] == [0, 1, 2]
    assert [(r.schedule_s, r.model_s, r.update_s) for r in records] == [(1.0, 1.0, 1.0)] * 3
    assert records[1].started_at > records[0].started_at >= 100
    assert records[0].admitted == (("a", 0),)
    assert records[1].admitted == (("b", 0),)
    assert records[2].finished == (("a", 0, FinishReason.LENGTH), ("b", 0, FinishReason.LENGTH))
    assert records[0].stats.running == 1
    assert records[2].stats.blocks_used == 0


def test_a_record_says_what_the_step_had_to_read_and_compute() -> None:
    """Counted by hand for a model of known sizes; a linear layer of 64 x 200 stands for the head
    and the embedding."""
    module = tiny_model("llama", torch.float32)
    layers = sum(p.numel() for name, p in module.named_parameters() if name.startswith("model.layers"))
    config = module.config
    width = config.num_attention_heads * config.head_dim
    kv = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    model = from_module(module, max_model_len=64, attention_backend="cpu")
    assert model.cost.head_weights == config.vocab_size * config.hidden_size
    assert layers <= model.cost.layer_weights <= layers + config.hidden_size  # and the last norm
    harness = Harness(model, num_blocks=64)
    first, second = harness.run([make_request("a", length=20, max_tokens=2)]).records
    weights = model.cost.layer_weights + model.cost.head_weights
    assert (first.num_bytes, second.num_bytes) == (4 * weights + 20 * kv, 4 * weights + 21 * kv)
    assert second.num_flops == 2 * weights + 4 * width * config.num_hidden_layers * 21
    assert first.num_flops > 20 * 2 * layers


@needs_compiler
def test_packed_weights_count_as_they_are_stored() -> None:
    exact, int8 = (
        from_module(tiny_model("llama", torch.float32), attention_backend="kernels", quantization=quantization)
        for quantization in ("none", "int8")
    )
    numbers = int8.cost.layer_weights + int8.cost.head_weights
    assert numbers <= int8.cost.weight_bytes < 1.5 * numbers
    assert int8.cost.weight_bytes < exact.cost.weight_bytes


def test_limits_are_measured() -> None:
    limits = measure_limits(torch.device("cpu"), torch.float32)
    assert limits.bytes_per_s > 1e8
    assert limits.flops_per_s > 1e8


def test_limits_are_measured_on_data_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU constants are multiplied faster than a model's numbers can be."""
    results: list[Tensor] = []

    def once(run: Callable[[], Tensor], *_: object, **__: object) -> list[float]:
        results.append(run())
        return [1.0]

    monkeypatch.setattr("serve_app.model.profiling.limits.call_times", once)
    measure_limits(torch.device("cpu"), torch.float32)
    assert [bool((result == result.view(-1)[0]).all()) for result in results] == [False, False]


def test_an_observer_that_fails_ends_nothing(tiny_llama: PagedModel, caplog: pytest.LogCaptureFixture) -> None:
    def observer(record: StepRecord) -> None:
        raise ZeroDivisionError(f"step {record.step}")

    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1), on_step=observer)
    core.add(make_request("r"))
    tokens = [token for _ in range(4) for delta in core.step() or [] for token in delta.token_ids]
    assert len(tokens) == 4
    assert caplog.text.count("ZeroDivisionError: step") == 1


def test_an_abort_frees_everything_at_once(tiny_llama: PagedModel) -> None:
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1, max_num_seqs=2))
    for name in ("a", "b", "waits"):
        core.add(make_request(name, n=1 + (name == "a")))
    core.step()
    for name in ("a", "b", "waits", "unknown"):
        core.abort(name)
        core.check_invariants()
    assert not core.has_unfinished
    assert core.stats().blocks_used == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_an_interrupted_step_costs_its_requests_and_no_others(
    tiny_llama: PagedModel, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while offline answers are computed: the engine is there for the next ones."""
    harness = Harness(tiny_llama, overlap=overlap, enable_prefix_cache=False)
    expected = Harness(tiny_llama).run([make_request("next")]).outcomes
    harness.core.add(make_request("interrupted"))
    harness.core.step()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_llama, "forward", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            harness.core.step()
    assert not harness.core.has_unfinished
    assert harness.run([make_request("next")]).outcomes == expected


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_step_that_fails_at_its_very_end_is_run_again_with_the_same_tokens(
    tiny_llama: PagedModel, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may run out wherever something is allocated: what is sampled must not have moved
    on."""

    requests = [make_request(name, max_tokens=20) for name in ("a", "b")]
    expected = Harness(tiny_llama, speculation="off").run(requests).outcomes
    harness = Harness(tiny_llama, speculation="off", overlap=overlap)
    pool, calls = runner.pool, itertools.count(1)

    def full_once(packed: PackedBatch, hidden: Tensor) -> Pooled:
        if next(calls) == 4:
            raise RuntimeError("out of memory")
        return pool(packed, hidden)

    monkeypatch.setattr(runner, "pool", full_once)
    assert harness.run(requests).outcomes == expected
    assert next(calls) > 5


def test_a_seed_that_is_missing_is_drawn(tiny_llama: PagedModel) -> None:
    harness = Harness(tiny_llama)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    run = harness.run([EngineRequest(name, (5, 6, 7), params) for name in ("a", "b")])
    assert run.outcomes["a", 0].token_ids != run.outcomes["b", 0].token_ids


def test_refusals_leave_nothing_behind(tiny_llama: PagedModel) -> None:
    core = EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1))
    with pytest.raises(InvalidRequestError, match="200"):
        core.add(EngineRequest("r", (200,), SamplingParams(max_tokens=1)))
    assert not core.has_unfinished
    core.add(make_request("r"))


def test_wrong_knobs_are_refused(tiny_llama: PagedModel) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineCore(tiny_llama, EngineConfig(kv_cache_gib=0.1, max_num_seqs=8, max_num_batched_tokens=4))
