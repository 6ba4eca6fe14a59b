import asyncio
import contextlib
import random
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.engine import async_engine
from serve_app.engine.async_engine import EngineHealth
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.paged_model import PagedModel
from tests.engine.harness import Harness
from tests.engine.streams import StreamEngine

POISON = 199
SMALL = EngineConfig(kv_cache_gib=0.1)


def make_request(name: str, length: int = 5, max_tokens: int = 8, **fields: object) -> EngineRequest:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(2, POISON, (length,), generator=generator).tolist()
    params = SamplingParams(max_tokens=max_tokens, **{"seed": 3, "ignore_eos": True, **fields})
    return EngineRequest(name, tuple(prompt), params)


async def collect(engine: StreamEngine, request: EngineRequest) -> list[TokenDelta]:
    return [delta async for news in engine.generate(request) for delta in news]


def tokens(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.token_ids]


def logprobs(deltas: list[TokenDelta], choice: int) -> list[TokenLogprob]:
    return [entry for delta in deltas if delta.choice == choice for entry in delta.logprobs]


async def settled(engine: StreamEngine) -> SchedulerStats:
    """The stats once the engine sleeps."""
    async with asyncio.timeout(20):
        # No client needs an event for this, so there is none.
        while (  # noqa: ASYNC110
            (stats := engine.stats()).running or stats.waiting or engine.health().last_step_age_s is not None
        ):
            await asyncio.sleep(0.002)
    return stats


async def test_64_at_once_get_what_each_would_get_alone(tiny_llama: PagedModel) -> None:
    requests = [make_request(f"r{i}", 1 + i, 3 + i % 7, n=1 + (i % 8 == 0), seed=i) for i in range(64)]
    harness = Harness(tiny_llama, max_num_batched_tokens=64)
    expected = {request.request_id: harness.run([request]).outcomes for request in requests}
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_gib=0.1)
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, config))
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, deltas in zip(requests, results, strict=True):
        for choice in range(request.params.n):
            outcome = expected[request.request_id][request.request_id, choice]
            assert tokens(deltas, choice) == outcome.token_ids
    await settled(engine)
    await engine.shutdown()


async def test_tokens_come_in_order_each_once(tiny_engine: StreamEngine) -> None:
    """What this event loop comes too late for, on a busy machine, comes with what follows."""
    items = [news async for news in tiny_engine.generate(make_request("r", max_tokens=6))]
    assert {len(news) for news in items} == {1}
    assert [i for (delta,) in items for i in range(delta.offset, delta.offset + len(delta.token_ids))] == list(range(6))
    assert [delta.finish_reason for (delta,) in items] == [None] * (len(items) - 1) + [FinishReason.LENGTH]
    await settled(tiny_engine)
    assert tiny_engine.health() == EngineHealth(alive=True, last_step_age_s=None, error=None)


async def test_a_thread_that_is_stuck_while_idle_is_seen_once_a_request_waits_for_it(tiny_engine: StreamEngine) -> None:
    leave = threading.Event()
    await collect(tiny_engine, make_request("before", max_tokens=2))
    await settled(tiny_engine)
    tiny_engine._inbox.put(lambda: leave.wait(20) and None)
    assert tiny_engine.health().last_step_age_s is None
    answer = asyncio.create_task(collect(tiny_engine, make_request("r", max_tokens=2)))
    await asyncio.sleep(0)
    first = tiny_engine.health().last_step_age_s
    assert first is not None
    await asyncio.sleep(0.01)
    second = tiny_engine.health().last_step_age_s
    assert second is not None
    assert second > first
    leave.set()
    assert len(tokens(await answer)) == 2
    await settled(tiny_engine)


async def test_outputs_of_many_between_first_and_last_become_one_delta(
    tiny_llama: PagedModel, tiny_engine: StreamEngine
) -> None:
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, SMALL), stream_interval_s=60.0)
    request = make_request("r", max_tokens=6, n=16, logprobs=1)
    items = [news async for news in engine.generate(request)]
    # At the latest when the first has begun, the others have (which they do a step later), and each
    # has ended.
    assert len(items) <= 4
    joined = [delta for news in items for delta in news]
    assert all(len({delta.choice for delta in news}) == len(news) for news in items)
    assert [delta.finish_reason for delta in joined].count(FinishReason.LENGTH) == 16
    step_by_step = await collect(tiny_engine, request)
    for choice in range(16):
        assert tokens(joined, choice) == tokens(step_by_step, choice)
        assert logprobs(joined, choice) == logprobs(step_by_step, choice)
    await engine.shutdown()


@pytest.mark.parametrize(("choices", "interval_s"), [(1, 60.0), (16, 0.05)], ids=["few wait for nothing", "many"])
async def test_outputs_wait_no_longer_than_they_may(tiny_llama: PagedModel, choices: int, interval_s: float) -> None:
    has_third = threading.Event()

    def hold_the_fourth_step(record: StepRecord) -> None:
        if record.step == 3:
            has_third.wait(20)

    core = EngineCore(tiny_llama, SMALL, on_step=hold_the_fourth_step)
    engine = await StreamEngine.start_with(lambda: core, stream_interval_s=interval_s)
    news = engine.generate(make_request("r", max_tokens=4, n=choices))
    told: list[TokenDelta] = []
    async with asyncio.timeout(10):
        while len(tokens(told)) < 3:
            told += await anext(news)
    has_third.set()
    assert [delta.offset async for item in news for delta in item if delta.choice == 0] == [3]
    await engine.shutdown()


async def test_cancelled_at_any_time_leaks_nothing(tiny_engine: StreamEngine) -> None:
    """More requests than slots, so that some are cancelled while they wait, some in prefill, some
    in decode."""
    rng = random.Random(4)

    async def some(name: str, items: int) -> None:
        stream = tiny_engine.generate(make_request(name, 1 + rng.randrange(150), 60, n=rng.choice((1, 1, 3))))
        async with contextlib.aclosing(stream):
            for _ in range(items):
                await anext(stream)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(some(f"r{i}", rng.choice((0, 1, 2, 20)))) for i in range(40)]
        for task in tasks[::3]:
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            task.cancel()
    stats = await settled(tiny_engine)
    assert stats.blocks_used == 0
    assert not tiny_engine._streams
    assert not tiny_engine._in_core
    assert len(tokens(await collect(tiny_engine, make_request("after")))) == 8


async def test_cancelled_before_the_engine_has_seen_it(tiny_engine: StreamEngine) -> None:
    task = asyncio.create_task(collect(tiny_engine, make_request("r", max_tokens=200)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(tiny_engine)


async def test_aborted_while_its_grammar_is_built_it_never_enters_the_engine(
    tiny_engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, entered, leave, left = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), asyncio.Event()

    def prepare(request: EngineRequest) -> None:
        loop.call_soon_threadsafe(entered.set)
        leave.wait(20)
        loop.call_soon_threadsafe(left.set)

    monkeypatch.setattr(tiny_engine._core, "prepare", prepare)
    tiny_engine.submit(make_request("r", max_tokens=200, ignore_eos=False, grammar='root ::= "a"'))
    await entered.wait()
    tiny_engine.abort("r")
    leave.set()
    await left.wait()
    assert len(tokens(await collect(tiny_engine, make_request("other")))) == 8
    await settled(tiny_engine)
    assert not tiny_engine._streams
    assert not tiny_engine._in_core


@pytest.mark.parametrize("error", [InvalidRequestError("no text matches"), ZeroDivisionError("secret")])
async def test_what_goes_wrong_with_a_grammar_ends_its_request_alone(
    tiny_engine: StreamEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def prepare(request: EngineRequest) -> None:
        raise error

    monkeypatch.setattr(tiny_engine._core, "prepare", prepare)
    with pytest.raises(InvalidRequestError if isinstance(error, InvalidRequestError) else EngineError) as caught:
        await collect(tiny_engine, make_request("r", ignore_eos=False, grammar='root ::= "a"'))
    assert "secret" not in str(caught.value)
    assert len(tokens(await collect(tiny_engine, make_request("r")))) == 8
    assert not tiny_engine._streams


async def test_an_id_can_be_used_again_at_once(tiny_engine: StreamEngine) -> None:
    """What was on its way for the first owner of the id must not reach the second."""
    expected = tokens(await collect(tiny_engine, make_request("other", 9)))
    for _ in range(10):
        stream = tiny_engine.generate(make_request("same", 30, 200))
        await anext(stream)
        await stream.aclose()
        assert tokens(await collect(tiny_engine, make_request("same", 9))) == expected


async def test_refusals_come_from_the_first_step(tiny_engine: StreamEngine) -> None:
    with pytest.raises(ContextLengthError):
        await collect(tiny_engine, make_request("r", 256))
    with pytest.raises(InvalidRequestError, match="200"):
        await collect(tiny_engine, replace(make_request("r"), prompt_token_ids=(200,)))
    stream = tiny_engine.generate(make_request("r", max_tokens=100))
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="in use"):
        await collect(tiny_engine, make_request("r"))
    assert len(await anext(stream)) == 1
    await stream.aclose()


async def test_missing_seeds_are_drawn_apart(tiny_engine: StreamEngine) -> None:
    results = [
        tokens(await collect(tiny_engine, make_request(f"r{i}", max_tokens=20, seed=None, temperature=2.0)))
        for i in range(2)
    ]
    assert results[0] != results[1]


async def test_a_full_queue_refuses(tiny_llama: PagedModel) -> None:
    config = EngineConfig(max_num_seqs=1, max_num_waiting=1, max_num_batched_tokens=64, kv_cache_gib=0.1)
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, config))
    running = engine.generate(make_request("running", max_tokens=240))
    await anext(running)
    waiting = asyncio.create_task(collect(engine, make_request("waiting")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await collect(engine, make_request("refused"))
    await running.aclose()
    assert len(tokens(await waiting)) == 8
    await engine.shutdown()


@pytest.fixture
def poisoned(tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch) -> PagedModel:
    """The model fails on every packed row that holds the token POISON, as a kernel would that
    dislikes one shape."""
    forward = tiny_llama.forward

    def fail_on_poison(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        if POISON in input_ids:
            raise RuntimeError("poisoned")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(tiny_llama, "forward", fail_on_poison)
    return tiny_llama


async def test_a_failing_request_hurts_nobody(poisoned: PagedModel, tiny_engine: StreamEngine) -> None:
    good = [make_request(f"good {i}", 3 + i, 12, n=1 + i % 2, logprobs=1) for i in range(6)]
    expected = [await collect(tiny_engine, request) for request in good]
    bad = EngineRequest("bad", (5, 6, POISON, 8), SamplingParams(max_tokens=5, seed=1, n=2))
    *results, failed = await asyncio.gather(*(collect(tiny_engine, request) for request in [*good, bad]))
    for before, after in zip(expected, results, strict=True):
        for choice in range(2):
            assert tokens(after, choice) == tokens(before, choice)
    assert {delta.choice: delta.finish_reason for delta in failed} == {0: FinishReason.ERROR, 1: FinishReason.ERROR}
    assert str(failed[0].error) == "the model failed on this request"
    alone = await collect(tiny_engine, replace(bad, request_id="bad, and alone in its step"))
    assert alone[-1].finish_reason is FinishReason.ERROR
    assert tiny_engine.health().alive
    await settled(tiny_engine)


async def test_a_broken_device_ends_the_engine(
    tiny_llama: PagedModel, tiny_engine: StreamEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams = [tiny_engine.generate(make_request(f"r{i}", max_tokens=200)) for i in range(3)]
    for stream in streams:
        await anext(stream)

    def broken(*args: object) -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(tiny_llama, "forward", broken)
    for stream in streams:
        with pytest.raises(EngineError, match="the engine died"):
            async for _ in stream:
                pass
    health = tiny_engine.health()
    assert not health.alive
    assert "the device is gone" in (health.error or "")
    assert health.last_step_age_s is None
    with pytest.raises(UnavailableError, match="the engine died"):
        await collect(tiny_engine, make_request("late"))
    assert "the engine died" in caplog.text


async def test_books_that_do_not_balance_are_found_when_idle(
    tiny_engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_IDLE_BEFORE_CHECK_S", 0.01)
    scheduler = tiny_engine._core._scheduler
    await collect(tiny_engine, make_request("fine"))
    await asyncio.sleep(0.1)
    assert tiny_engine.health().alive
    scheduler._free_slots.pop()
    await collect(tiny_engine, make_request("the last"))
    async with asyncio.timeout(10):
        while tiny_engine.health().alive:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert "slot" in (tiny_engine.health().error or "")


async def test_shutdown_ends_what_runs_and_waits(tiny_engine: StreamEngine) -> None:
    running = tiny_engine.generate(make_request("running", max_tokens=240))
    await anext(running)
    tasks = [asyncio.create_task(collect(tiny_engine, make_request(f"r{i}", max_tokens=200))) for i in range(20)]
    await asyncio.sleep(0)
    await tiny_engine.shutdown()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {UnavailableError}
    with pytest.raises(UnavailableError):
        async for _ in running:
            pass
    with pytest.raises(UnavailableError):
        await collect(tiny_engine, make_request("late"))
    assert not tiny_engine.health().alive
    await tiny_engine.shutdown()


async def test_a_failed_start_is_raised() -> None:
    def build() -> EngineCore:
        raise ConfigError("model: no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        await StreamEngine.start_with(build)


async def test_static_policy_wakes_by_itself(tiny_llama: PagedModel) -> None:
    """One request, and no news after it: only the clock can start the batch."""
    records: list[StepRecord] = []
    config = EngineConfig(policy="static", max_wait_s=0.05, max_num_batched_tokens=64, kv_cache_gib=0.1)
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, config, on_step=records.append))
    assert len(tokens(await collect(engine, make_request("r")))) == 8
    assert len(records) == 8
    await engine.shutdown()


async def test_the_loop_stays_free_while_the_model_loads_and_runs(tiny_llama: PagedModel) -> None:
    """`build` may take long; the event loop must not wait for it."""
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def build() -> EngineCore:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(timeout=10)
        return EngineCore(tiny_llama, EngineConfig(max_num_batched_tokens=64, kv_cache_gib=0.1))

    starting = asyncio.create_task(StreamEngine.start_with(build))
    await entered.wait()
    assert not starting.done()
    leave.set()
    engine = await starting
    await engine.shutdown()


async def test_other_knobs_under_load_change_the_steps_and_no_token(tiny_llama: PagedModel) -> None:
    requests = [make_request(f"r{i}", 40 + i, 30, n=1 + i % 2, seed=i) for i in range(12)]
    harness = Harness(tiny_llama)
    expected = {request.request_id: harness.run([request]).outcomes for request in requests}
    records: list[StepRecord] = []
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_gib=0.1)
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, config, on_step=records.append))
    stream = engine.generate(make_request("first", 3, 2))
    tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
    await anext(stream)
    engine.reconfigure(SchedulerKnobs(max_num_seqs=3, max_num_batched_tokens=5, waiting_served_ratio=1.0))
    changed_at = len(records) + 2  # a step may be on its way, and another be planned already
    await stream.aclose()
    for request, deltas in zip(requests, await asyncio.gather(*tasks), strict=True):
        for choice in range(request.params.n):
            assert tokens(deltas, choice) == expected[request.request_id][request.request_id, choice].token_ids
    late = records[changed_at:]
    assert late
    assert max(sum(row.num_tokens for row in record.rows) for record in late) == 5
    assert max(len(record.rows) for record in late) == 3
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine.reconfigure(SchedulerKnobs(max_num_seqs=17, max_num_batched_tokens=64))
    assert tokens(await collect(engine, make_request("r0", 40, 30, seed=0))) == expected["r0"]["r0", 0].token_ids
    await settled(engine)
    await engine.shutdown()
