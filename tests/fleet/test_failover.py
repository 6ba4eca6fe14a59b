"""A request whose replicas are lost at any token gives what it gives undisturbed: real engines,
scripted losses."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import (
    ENGINE_DIED,
    KILLED_REPLICAS,
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from serve_app.fleet import failover
from serve_app.fleet.attempt import Attempt
from serve_app.fleet.loss import LossReason
from serve_app.model import loader
from tests.engine.streams import StreamEngine
from tests.examples import examples
from tests.fleet.replicas import FAR, Fault, Fleet, Told, told, until
from tests.models import tiny_model

LOST, SILENT = Fault(0, LossReason.UNAVAILABLE), Fault(0, None)
PLANNED = [LossReason.LEFT, LossReason.CUT]


@dataclass
class Lab:
    """Two engines with the same weights, and the loop they live on."""

    runner: asyncio.Runner
    engines: dict[str, StreamEngine]

    def fleet(self) -> Fleet:
        return Fleet(self.engines)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """In float32, on the kernels, where a row has its own bits: log-probabilities are compared to
    the last one."""

    async def start() -> StreamEngine:
        model = loader.from_module(tiny_model("llama", torch.float32), max_model_len=128)
        config = EngineConfig(max_num_batched_tokens=16, kv_cache_gib=0.05)
        return await StreamEngine.start_with(lambda: EngineCore(model, config))

    async def start_both() -> dict[str, StreamEngine]:
        return {"a": await start(), "b": await start()}

    with asyncio.Runner() as runner:
        engines = runner.run(start_both())
        yield Lab(runner, engines)
        for engine in engines.values():
            runner.run(engine.shutdown())


def request(prompt_length: int = 20, **params: object) -> EngineRequest:
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(2, 199, (prompt_length,), generator=generator).tolist()
    return EngineRequest("r", tuple(prompt), SamplingParams(**{"seed": 5, "max_tokens": 7, **params}))  # type: ignore[arg-type]


def without_cache(choices: list[Told]) -> list[Told]:
    """What the prefix cache holds depends on who ran before."""
    return [replace(choice, cached=[]) for choice in choices]


VARIANTS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.1, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "two choices": {"n": 2, "temperature": 1.3, "logprobs": 1},
    "min tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(2, 199, 3)), "temperature": 1.5},
    "stop tokens": {"stop_token_ids": tuple(range(2, 199, 5)), "temperature": 1.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lost_at_every_item_and_told_once(lab: Lab, variant: str) -> None:
    subject = request(**VARIANTS[variant])

    async def run() -> None:
        expected = without_cache(await told(lab.fleet().failover, subject))
        items = 1 + sum(len(choice.token_ids) for choice in expected)
        for at in range(items):
            fleet = lab.fleet()
            fleet.faults = [Fault(at, LossReason.UNAVAILABLE)]
            assert without_cache(await told(fleet.failover, subject)) == expected
            if fleet.losses:
                assert [name for _, name in fleet.placed] in (["a", "b"], ["b", "a"])

    lab.runner.run(run())


@st.composite
def subjects(draw: st.DrawFn) -> EngineRequest:
    greedy = draw(st.booleans())
    max_tokens = draw(st.integers(1, 8))
    return request(
        draw(st.sampled_from([1, 7, 16, 33, 40])),
        n=draw(st.integers(1, 3)),
        temperature=0.0 if greedy else 1.2,
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), tuple(range(2, 199, 4))])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )


@settings(max_examples=examples(30))
@given(subject=subjects(), faults=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(PLANNED)), max_size=4))
def test_any_request_lost_any_number_of_times(
    lab: Lab, subject: EngineRequest, faults: list[tuple[int, LossReason]]
) -> None:
    async def run() -> None:
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = lab.fleet()
        fleet.faults = [Fault(*fault) for fault in faults]
        assert without_cache(await told(fleet.failover, subject)) == expected
        assert len(fleet.observer.ends) == len(fleet.placed) == len(fleet.losses) + 1

    lab.runner.run(run())


def run(lab: Lab, coroutine: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await coroutine

    lab.runner.run(limited())


def test_cached_tokens_are_those_of_the_first_attempt(lab: Lab) -> None:
    async def check() -> None:
        subject = request(40)
        await told(lab.fleet().failover, subject)
        fleet = lab.fleet()
        fleet.faults = [Fault(3, LossReason.UNAVAILABLE)]
        [choice] = await told(fleet.failover, subject)
        first, second = fleet.observer.starts.values()
        assert choice.cached == [first]
        assert second >= 0

    run(lab, check())


def test_a_choice_that_is_over_for_the_reader_is_not_computed_again(lab: Lab) -> None:
    async def check() -> None:
        subject = request(n=2, temperature=1.3)
        expected = await told(lab.fleet().failover, subject)
        fleet = lab.fleet()
        fleet.faults = [Fault(3, LossReason.UNAVAILABLE)]
        ended: set[int] = set()
        tokens: list[list[int]] = [[], []]
        async for deltas in fleet.failover.generate(subject, deadline=FAR, ended=ended):
            for delta in deltas:
                tokens[delta.choice] += delta.token_ids
            if len(tokens[0]) == 2:
                ended.add(0)
        assert fleet.requests[1]["finished_choices"] == (0,)
        assert tokens[0] == expected[0].token_ids[: len(tokens[0])] != expected[0].token_ids
        assert tokens[1] == expected[1].token_ids

    run(lab, check())


@pytest.mark.parametrize(
    "error", [ContextLengthError("long", param="prompt"), EngineError("this row"), RequestTimeoutError("late")]
)
def test_a_requests_own_error_is_final(lab: Lab, error: RequestError) -> None:
    async def check() -> None:
        fleet = lab.fleet()
        fleet.faults = [Fault(2, error)]
        with pytest.raises(type(error), match=error.message):
            await told(fleet.failover, request())
        assert len(fleet.placed) == 1
        assert not fleet.losses

    run(lab, check())


def test_what_an_engine_refuses_is_refused(lab: Lab) -> None:
    async def check() -> None:
        with pytest.raises(ContextLengthError):
            await told(lab.fleet().failover, request(127, max_tokens=50))

    run(lab, check())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("broken", code=ENGINE_DIED), LossReason.ENGINE_DIED),
        (UnavailableError("shutting down"), LossReason.REFUSED),
    ],
)
def test_an_engine_that_ends_costs_an_attempt(lab: Lab, error: RequestError, reason: LossReason) -> None:
    async def check() -> None:
        subject = request()
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = lab.fleet()
        fleet.faults = [Fault(4, error)]
        assert without_cache(await told(fleet.failover, subject)) == expected
        [known] = fleet.requests[1]["prior_output_ids"]
        assert len(known) == 4
        assert fleet.losses == [(reason, 20 + 4)]
        (_, first), (_, second) = fleet.placed
        assert first != second
        assert first not in fleet.routable()
        fleet.replicas.trust(first)
        assert first in fleet.routable()

    run(lab, check())


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_was_let_in_is_never_told_of_overload(lab: Lab, begun: bool) -> None:
    async def check() -> None:
        subject = request()
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = lab.fleet()
        full = Fault(0, OverloadedError("full", retry_after_s=3.0))
        fleet.faults = [Fault(2 if begun else 0, LossReason.LEFT), *[full] * 100]
        assert without_cache(await told(fleet.failover, subject)) == expected
        assert [reason for reason, _ in fleet.losses] == [LossReason.LEFT]
        assert fleet.observer.refusals == [attempt_id for attempt_id, _ in fleet.placed[1:-1]]

    run(lab, check())


def test_refusals_are_no_deaths(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_FIRST_PAUSE_S", 0.001)

    async def check() -> None:
        subject = request()
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = Fleet({f"replica {i}": lab.engines["a"] for i in range(3)})
        refusals = [Fault(0, OverloadedError("full"))] * 6 + [Fault(0, LossReason.CUT)] * 6
        fleet.faults = [Fault(2, LossReason.UNAVAILABLE), *refusals, Fault(0, LossReason.UNAVAILABLE)]
        assert without_cache(await told(fleet.failover, subject)) == expected

    run(lab, check())


def test_without_replicas_requests_wait_for_one(lab: Lab) -> None:
    async def check() -> None:
        fleet = lab.fleet()
        fleet.replicas.publish({})
        waiting = asyncio.create_task(told(fleet.failover, request()))
        await asyncio.sleep(0)
        assert not fleet.placed
        fleet.replicas.publish({"b": {}})
        await waiting
        assert [name for _, name in fleet.placed] == ["b"]

    run(lab, check())


def test_without_replicas_requests_end_in_time(lab: Lab) -> None:
    async def check() -> None:
        fleet = Fleet(lab.engines, wait_s=0.05)
        fleet.faults = [Fault(2, LossReason.UNAVAILABLE), Fault(1, LossReason.UNAVAILABLE)]
        with pytest.raises(UnavailableError, match="no engine replica") as caught:
            await told(fleet.failover, request())
        assert caught.value.retry_after_s is not None
        with pytest.raises(UnavailableError):
            await told(fleet.failover, request())
        assert len(fleet.placed) == 2

    run(lab, check())


def test_the_deadline_holds_while_waiting_and_while_reading(lab: Lab) -> None:
    async def check() -> None:
        fleet = lab.fleet()
        fleet.faults = [Fault(2, None)]
        with pytest.raises(RequestTimeoutError):
            await told(fleet.failover, request(), deadline=time.monotonic() + 0.2)
        fleet.replicas.publish({})
        with pytest.raises(RequestTimeoutError):
            await told(fleet.failover, request(), deadline=time.monotonic() + 0.05)
        assert not fleet.replicas.attempts()

    run(lab, check())


def test_closing_ends_the_attempt(lab: Lab) -> None:
    async def check() -> None:
        fleet = lab.fleet()
        stream = fleet.failover.generate(request(max_tokens=100), deadline=FAR)
        await anext(stream)
        [(attempt_id, name)] = fleet.placed
        assert fleet.in_flight(name) == 1
        await stream.aclose()
        assert fleet.in_flight(name) == 0
        assert fleet.observer.ends == [attempt_id]
        engine = lab.engines[name]
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)

    run(lab, check())


class Healing(Fleet):
    """Each replica is lost once, and heard again when the next one has the request."""

    def start(self, attempt: Attempt) -> None:
        super().start(attempt)
        for _, name in self.placed:
            self.replicas.trust(name)
        self.engines = {name: self.engines[name] for name in (*list(self.engines)[1:], next(iter(self.engines)))}


def test_replicas_that_are_heard_again_did_not_die(lab: Lab) -> None:
    """False stalls, as on a machine that is too busy, neither isolate nor end a request, however
    many."""

    async def check() -> None:
        subject = request(max_tokens=20)
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = Healing({f"replica {i}": lab.engines["a"] for i in range(8)})
        fleet.faults = [Fault(1, LossReason.STALLED)] * 12
        assert without_cache(await told(fleet.failover, subject)) == expected
        assert len({name for _, name in fleet.placed}) > 6

    run(lab, check())


def test_deaths_with_progress_between_them_do_not_end_a_request(lab: Lab) -> None:
    """A fleet that is struck at random loses nothing, and nobody is suspected."""

    async def check() -> None:
        subject = request(max_tokens=20)
        expected = without_cache(await told(lab.fleet().failover, subject))
        names = [f"replica {i}" for i in range(7)]
        fleet = Fleet(dict.fromkeys(names, lab.engines["a"]))
        reserved: list[str] = []
        fleet.replicas.add_listener(
            lambda: reserved.extend(r.replica_id for r in fleet.replicas.replicas() if r.reserved)
        )
        fleet.faults = [Fault(1, LossReason.UNAVAILABLE)] * 5
        assert without_cache(await told(fleet.failover, subject)) == expected
        assert len(fleet.losses) == 5
        assert not reserved
        fleet = Fleet(dict.fromkeys(names, lab.engines["a"]))
        fleet.faults = [Fault(1, LossReason.UNAVAILABLE)] * 6
        with pytest.raises(EngineError) as caught:
            await told(fleet.failover, subject)
        assert caught.value.code == "request_killed_replicas"
        fleet.faults = []
        assert without_cache(await told(fleet.failover, subject)) == expected, "it has killed nothing"

    run(lab, check())


def test_planned_moves_do_not_count(lab: Lab) -> None:
    async def check() -> None:
        subject = request()
        expected = without_cache(await told(lab.fleet().failover, subject))
        fleet = Fleet(lab.engines, wait_s=0.0)
        fleet.faults = [Fault(0, reason) for reason in (LossReason.LEFT, LossReason.QUARANTINE) * 8]
        assert without_cache(await told(fleet.failover, subject)) == expected

    run(lab, check())


def test_a_request_that_replicas_die_of_runs_alone_and_is_refused(lab: Lab) -> None:
    """It has no other streams beside it once two replicas died at once; the others' streams are
    whole."""

    async def check() -> None:
        fleet = big_fleet(lab, 5)
        innocent = request(9, max_tokens=60)
        expected = without_cache(await told(lab.fleet().failover, innocent))
        fleet.faults = [Fault(2, LossReason.UNAVAILABLE), LOST, LOST, SILENT, None]
        poison = asyncio.create_task(told(fleet.failover, request()))
        await until(lambda: fleet.num_hanging == 1)
        assert len({name for _, name in fleet.placed}) == 4
        alone, its_replica = fleet.placed[3]
        others = [asyncio.create_task(told(fleet.failover, innocent)) for _ in range(4)]
        assert [without_cache(await other) for other in others] == [expected] * 4
        assert its_replica not in {name for _, name in fleet.placed[4:]}
        fleet.attempt(alone).interrupt(LossReason.UNAVAILABLE)
        with pytest.raises(EngineError) as caught:
            await poison
        assert caught.value.code == "request_killed_replicas"
        assert its_replica not in fleet.routable()
        assert len(fleet.routable()) == 1
        placed = len(fleet.placed)
        with pytest.raises(EngineError, match="like this"):
            await told(fleet.failover, request())
        assert len(fleet.placed) == placed

    run(lab, check())


def big_fleet(lab: Lab, num_replicas: int) -> Fleet:
    return Fleet({f"replica {i}": lab.engines["ab"[i % 2]] for i in range(num_replicas)})


def numbered(number: int) -> EngineRequest:
    return request(20 + number)


def test_suspects_run_alone_side_by_side_on_a_quarter_of_the_fleet(lab: Lab) -> None:
    async def check() -> None:
        fleet = big_fleet(lab, 14)
        suspects = []
        for number in range(3):
            fleet.faults = [LOST, LOST, SILENT]
            suspects.append(asyncio.create_task(told(fleet.failover, numbered(number))))
            await until(lambda: len(fleet.losses) == 2 * number + 2)  # noqa: B023
            await until(lambda: fleet.num_hanging == min(number + 1, 2))  # noqa: B023
        (_, one), (_, other) = fleet.placed[2], fleet.placed[5]
        assert one != other
        assert [fleet.in_flight(name) for name in (one, other)] == [1, 1]
        assert len(fleet.routable()) == 6
        fleet.faults = []
        await told(fleet.failover, request(9))
        assert fleet.placed[-1][1] not in (one, other)
        assert len(fleet.placed) == 9, "the third one waits"
        suspects[0].cancel()
        await suspects[2]
        assert fleet.placed[-1][1] == one
        suspects[1].cancel()
        await asyncio.gather(*suspects, return_exceptions=True)
        assert not any(replica.reserved for replica in fleet.replicas.replicas())

    run(lab, check())


def test_a_suspect_is_none_any_more_once_it_has_tokens(lab: Lab) -> None:
    async def check() -> None:
        fleet = big_fleet(lab, 4)
        fleet.faults = [LOST, LOST, Fault(1, None)]
        suspect = asyncio.create_task(told(fleet.failover, request()))
        await until(lambda: fleet.num_hanging == 1)
        await until(lambda: len(fleet.routable()) == 2)
        (_, its_replica) = fleet.placed[2]
        await asyncio.gather(told(fleet.failover, request(9)), told(fleet.failover, request(10)))
        assert its_replica in {name for _, name in fleet.placed[3:]}
        suspect.cancel()
        await asyncio.gather(suspect, return_exceptions=True)

    run(lab, check())


def test_the_last_replica_is_never_closed_and_suspects_take_turns_on_it(lab: Lab) -> None:
    async def check() -> None:
        fleet = big_fleet(lab, 5)
        fleet.faults = [LOST, LOST, SILENT]
        first = asyncio.create_task(told(fleet.failover, numbered(0)))
        await until(lambda: fleet.num_hanging == 1)
        fleet.faults = [LOST, LOST]
        second = asyncio.create_task(told(fleet.failover, numbered(1)))
        await until(lambda: len(fleet.losses) == 4)
        await until(lambda: len(fleet.routable()) == 1)
        await told(fleet.failover, numbered(2))
        assert [name for _, name in fleet.placed[5:]] == [fleet.placed[2][1]], "beside the suspect; the other one waits"
        first.cancel()
        await second
        await asyncio.gather(first, return_exceptions=True)

    run(lab, check())


def test_replicas_with_streams_are_emptied_one_at_a_time_and_handed_on(lab: Lab) -> None:
    async def check() -> None:
        fleet = big_fleet(lab, 14)
        fleet.faults = [Fault(1, None)] * 14
        others = [asyncio.create_task(told(fleet.failover, request(9))) for _ in range(14)]
        await until(lambda: fleet.num_hanging == 14)
        fleet.faults = [LOST, LOST, Fault(1, None), SILENT]
        suspects = [asyncio.create_task(told(fleet.failover, numbered(0)))]
        await until(lambda: fleet.num_hanging == 16)
        fleet.faults = [LOST, LOST]
        suspects.append(asyncio.create_task(told(fleet.failover, numbered(1))))
        await until(lambda: len(fleet.losses) == 5)
        await asyncio.sleep(0.01)
        assert [reason for reason, _ in fleet.losses].count(LossReason.QUARANTINE) == 1
        closed = {replica.replica_id for replica in fleet.replicas.replicas() if replica.reserved}
        suspects[0].cancel()
        await suspects[1]
        assert {fleet.placed[-1][1]} == closed
        assert [reason for reason, _ in fleet.losses].count(LossReason.QUARANTINE) == 1
        for task in others:
            task.cancel()
        await asyncio.gather(*others, *suspects, return_exceptions=True)

    run(lab, check())


def test_a_request_that_replicas_died_of_is_refused_at_once_for_some_minutes(lab: Lab) -> None:
    async def check() -> None:
        fleet = big_fleet(lab, 6)
        fleet.faults = [LOST] * 3
        for seed in (1, 2):
            with pytest.raises(EngineError) as caught:
                await told(fleet.failover, request(seed=seed))
            assert caught.value.code == KILLED_REPLICAS
        assert len(fleet.placed) == 3
        await told(fleet.failover, request(max_tokens=8))

    run(lab, check())


def test_a_request_goes_to_another_revision_only_before_its_first_token(lab: Lab) -> None:
    """So an update of the engines strands nobody who waits, and changes nobody's tokens half
    way."""

    async def check() -> None:
        fleet = Fleet(lab.engines)
        fleet.replicas.publish({"a": {"revision": "old"}, "b": {"revision": "new"}})
        fleet.faults = [Fault(0, LossReason.REFUSED)]
        task = asyncio.create_task(told(fleet.failover, request()))
        await until(lambda: len(fleet.placed) == 2)
        await task
        assert [name for _, name in fleet.placed] == ["a", "b"]
        fleet.replicas.publish({"b": {"revision": "new"}})
        fleet.faults = [Fault(2, LossReason.LEFT)]
        task = asyncio.create_task(told(fleet.failover, request()))
        await until(lambda: len(fleet.placed) == 3)
        fleet.replicas.publish({"a": {"revision": "old"}})
        await until(lambda: len(fleet.losses) == 1)
        await asyncio.sleep(0.01)
        assert len(fleet.placed) == 3, "it waits for its revision"
        fleet.replicas.publish({"a": {"revision": "old"}, "c": {"revision": "new"}})
        fleet.engines = fleet.engines | {"c": fleet.engines["b"]}
        await task
        assert fleet.placed[-1][1] == "c"

    run(lab, check())


def test_a_request_waits_for_its_revision_as_long_as_for_any_replica(lab: Lab) -> None:
    async def check() -> None:
        fleet = Fleet(lab.engines, wait_s=0.05)
        fleet.replicas.publish({"a": {"revision": "old"}, "b": {"revision": "new"}})
        fleet.faults = [Fault(2, LossReason.UNAVAILABLE)]
        with pytest.raises(UnavailableError, match="no engine replica"):
            await told(fleet.failover, request())
        assert len(fleet.placed) == 1

    run(lab, check())
