"""What the set remembers and whom it offers."""

import asyncio

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet.attempt import Attempt, Replica
from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.replica_set import ReplicaSet


@pytest.fixture
def replicas() -> ReplicaSet:
    replicas = ReplicaSet()
    replicas.publish({"a": {"pid": 1}, "b": {"pid": 2}, "c": {"pid": 3}})
    return replicas


def attempt(replicas: ReplicaSet, reserved: str | None = None, revision: str | None = None) -> Attempt:
    """Return an attempt that waits for a slot."""
    replica = None if reserved is None else replicas.get(reserved)
    request = EngineRequest("r", (1, 2), SamplingParams())
    waiting = Attempt("r.1", request, since=0.0, deadline=1e9, reserved=replica, revision=revision)
    replicas.begin(waiting)
    return waiting


def ids(replicas: list[Replica]) -> list[str]:
    return [replica.replica_id for replica in replicas]


def in_flight(replicas: ReplicaSet) -> dict[str, int]:
    return {replica.replica_id: len(replica.attempts) for replica in replicas.replicas()}


def test_offers_those_that_can_serve(replicas: ReplicaSet) -> None:
    replicas.suspect("b", "stalled")
    assert ids(replicas.routable()) == ["a", "c"]
    replicas.reserve("c")
    assert ids(replicas.candidates(attempt(replicas))) == ["a"]
    assert ids(replicas.alive()) == ["a", "c"]
    replicas.trust("b")
    replicas.release("c")
    assert ids(replicas.routable()) == ["a", "b", "c"]


def test_an_attempt_with_a_reservation_may_go_there_only(replicas: ReplicaSet) -> None:
    mine = attempt(replicas, reserved="b")
    replicas.reserve("b")
    replicas.suspect("b", "stalled")
    assert ids(replicas.candidates(mine)) == ["b"]
    replicas.publish({"a": {}, "c": {}})
    assert ids(replicas.candidates(mine)) == []


def test_attempts_are_found_where_they_are_until_they_end(replicas: ReplicaSet) -> None:
    one = attempt(replicas)
    assert replicas.attempts() == list(replicas.waiting.values()) == [one]
    replicas.place(one, "b")
    assert one.replica is replicas.get("b")
    assert not replicas.waiting
    assert replicas.attempts() == [one]
    assert in_flight(replicas) == {"a": 0, "b": 1, "c": 0}
    replicas.end(one)
    replicas.end(one)
    assert not replicas.attempts()
    assert in_flight(replicas) == {"a": 0, "b": 0, "c": 0}


def test_who_left_is_remembered_while_it_has_attempts(replicas: ReplicaSet) -> None:
    one = attempt(replicas)
    replicas.place(one, "a")
    replicas.publish({"c": {"pid": 4}})
    assert [replica.replica_id for replica in replicas.replicas()] == ["a", "c"]
    assert replicas.current() == {"c": {"pid": 4}}
    assert ids(replicas.alive()) == ["c"]
    replicas.end(one)
    assert [replica.metadata for replica in replicas.replicas()] == [{"pid": 4}]


def test_who_left_is_remembered_while_it_is_reserved(replicas: ReplicaSet) -> None:
    reserved = replicas.get("b")
    replicas.reserve("b")
    replicas.publish({})
    replicas.publish({"b": {}})
    assert replicas.get("b") is reserved
    replicas.publish({})
    replicas.release("b")
    assert replicas.replicas() == []


def test_what_no_other_revision_can_continue_is_offered_its_own() -> None:
    replicas = ReplicaSet()
    replicas.publish({"a": {"revision": "old"}, "b": {"revision": "new"}})
    assert ids(replicas.candidates(attempt(replicas))) == ["a", "b"]
    assert ids(replicas.candidates(attempt(replicas, revision="old"))) == ["a"]
    replicas.suspect("a", "stalled")
    assert ids(replicas.routable("old")) == []


def test_replicas_with_another_tokenizer_are_never_offered() -> None:
    replicas = ReplicaSet("ours")
    replicas.publish({"a": {"tokenizer": "another", "revision": "old"}, "b": {}})
    assert ids(replicas.alive()) == ids(replicas.routable()) == []


OLD, NEW = {"tokenizer": "ours", "revision": "old"}, {"tokenizer": "theirs", "revision": "new"}


def test_one_that_leaves_is_offered_and_kept_while_those_in_its_place_have_another_tokenizer() -> None:
    replicas = ReplicaSet("ours")
    replicas.publish({"a": OLD, "b": OLD})
    replicas.publish({"b": OLD, "c": NEW})
    assert ids(replicas.replicas()) == ["b", "c"], "b serves on"
    replicas.publish({"c": NEW})
    assert ids(replicas.routable()) == ids(replicas.candidates(attempt(replicas, revision="old"))) == ["b"]
    leaving = replicas.get("b")
    assert leaving is not None
    assert replicas.is_alive(leaving)
    replicas.reserve("b")
    assert ids(replicas.candidates(attempt(replicas, reserved="b", revision="old"))) == ["b"], "a suspect may run there"
    replicas.release("b")
    replicas.publish({"c": NEW, "d": OLD})
    assert not replicas.is_alive(leaving)
    assert ids(replicas.replicas()) == ["c", "d"]
    replicas.publish({"c": NEW})
    replicas.suspect("d", "unavailable")
    assert ids(replicas.replicas()) == ["c"], "its link has broken"


def test_one_that_leaves_without_another_in_its_place_takes_no_new_requests() -> None:
    """Else it would never end, and the replica that waits for its GPU never start."""
    replicas = ReplicaSet("ours")
    replicas.publish({"a": OLD})
    one = attempt(replicas)
    replicas.place(one, "a")
    replicas.publish({})
    assert ids(replicas.alive()) == []
    assert ids(replicas.alive("old")) == ["a"], "what only it can continue adds nothing to its end"
    replicas.end(one)
    assert replicas.replicas() == []


def test_loads_are_those_last_told(replicas: ReplicaSet) -> None:
    first, last = (ReplicaLoad(running, 0, 9, 9, 1, None, at=1.0) for running in (4, 5))
    replicas.note_load("a", first)
    replicas.note_load("a", last)
    replicas.note_load("unknown", last)
    assert replicas.loads() == {"a": last}


def test_listeners_hear_of_every_change_of_choice_until_they_are_removed(replicas: ReplicaSet) -> None:
    heard: list[list[str]] = []
    remove = replicas.add_listener(lambda: heard.append(ids(replicas.routable())))
    replicas.suspect("a", "stalled")
    replicas.suspect("a", "left")
    replicas.trust("a")
    replicas.trust("a")
    replicas.reserve("b")
    one = attempt(replicas)
    replicas.place(one, "b")
    replicas.end(one)
    replicas.publish({"c": {}})
    remove()
    replicas.publish({})
    assert heard == [["b", "c"], ["a", "b", "c"], ["a", "c"], ["a", "c"], ["c"]]


async def test_an_interrupted_attempt_gives_nothing_more(replicas: ReplicaSet) -> None:
    one = attempt(replicas)
    reading = asyncio.create_task(one.next())
    await asyncio.sleep(0)
    one.interrupt(LossReason.LEFT)
    one.receive([])
    one.interrupt(LossReason.STALLED)
    for read in (reading, one.next()):
        with pytest.raises(ReplicaLostError) as lost:
            await read
        assert lost.value.reason is LossReason.LEFT
