"""What the set remembers and whom it offers."""

import pytest

from serve_app.serving.replica_set import ReplicaLoad, ReplicaSet


@pytest.fixture
def replicas() -> ReplicaSet:
    replicas = ReplicaSet()
    replicas.publish({"a": {"pid": 1}, "b": {"pid": 2}, "c": {"pid": 3}})
    return replicas


def load(at: float, running: int = 0) -> ReplicaLoad:
    return ReplicaLoad(running, 0, 9, 9, 1, None, at)


def test_offers_those_that_can_serve_in_the_order_given(replicas: ReplicaSet) -> None:
    replicas.suspect("b", "stalled")
    assert replicas.routable(["c", "b", "a", "unknown"]) == ["c", "a"]
    replicas.reserve("c")
    assert replicas.routable(["c", "b", "a"], "some attempt") == ["a"]
    assert replicas.alive() == ["a", "c"]
    replicas.trust("b")
    replicas.release("c")
    assert replicas.routable(["c", "b", "a"]) == ["c", "b", "a"]


def test_a_pinned_attempt_may_go_to_its_replica_only(replicas: ReplicaSet) -> None:
    replicas.pin("mine", "b")
    replicas.reserve("b")
    replicas.suspect("b", "stalled")
    assert replicas.routable(["a", "b", "c"], "mine") == ["b"]
    assert replicas.routable(["a", "c"], "mine") == []
    replicas.end("mine")
    assert replicas.routable(["a", "b", "c"], "mine") == ["a", "c"]


def test_attempts_are_counted_until_they_end(replicas: ReplicaSet) -> None:
    replicas.begin("r.1")
    assert replicas.replica_of("r.1") is None
    replicas.note_assigned("r.1", "b")
    replicas.note_assigned("never begun", "b")
    assert [replicas.in_flight(name) for name in "abc"] == [0, 1, 0]
    replicas.end("r.1")
    replicas.end("r.1")
    replicas.note_assigned("r.1", "b")
    assert replicas.in_flight("b") == 0


def test_who_left_is_remembered_while_it_has_attempts(replicas: ReplicaSet) -> None:
    replicas.begin("r.1")
    replicas.note_assigned("r.1", "a")
    replicas.publish({"c": {"pid": 4}})
    assert [replica.replica_id for replica in replicas.replicas()] == ["a", "c"]
    assert replicas.current() == {"c": {"pid": 4}}
    assert not replicas.is_alive("a")
    replicas.end("r.1")
    assert [replica.metadata for replica in replicas.replicas()] == [{"pid": 4}]


def test_older_news_of_load_are_ignored(replicas: ReplicaSet) -> None:
    replicas.note_load("a", load(2.0, running=5))
    replicas.note_load("a", load(1.0, running=4))
    replicas.note_load("unknown", load(1.0))
    assert replicas.loads() == {"a": load(2.0, running=5)}


def test_listeners_hear_of_every_change_of_choice(replicas: ReplicaSet) -> None:
    heard: list[list[str]] = []
    replicas.add_listener(lambda: heard.append(replicas.routable("abc")))
    replicas.suspect("a", "stalled")
    replicas.suspect("a", "left")
    replicas.trust("a")
    replicas.trust("a")
    replicas.reserve("b")
    replicas.begin("r.1")
    replicas.note_assigned("r.1", "b")
    replicas.end("r.1")
    replicas.publish({"c": {}})
    assert heard == [["b", "c"], ["a", "b", "c"], ["a", "c"], ["a", "c"], ["c"]]
