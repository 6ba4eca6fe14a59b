"""What the launcher tells of Ray's actors and of readiness, from tables and answers such as Ray's
and the ingress's."""

import threading
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest

import tests.quiet_ray  # noqa: F401
from serve_app.launch import watch
from serve_app.launch.watch import Watch
from serve_app.serving.ray_patches import Actor
from serve_app.system.http_client import HttpStatusError

ENGINE = Actor("a", "ServeReplica:app:EngineReplica", 7, dead=False, restarts=0, crashed=True, cause="")
CAUSE = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ..."
)


class World:
    """What the watch sees: Ray's table, the answer of /health/ready, the kernel's count."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.table = [ENGINE]
        self.problem: Exception | None = None
        self.lines: list[str] = []
        self.vmstat = folder / "vmstat"
        self.vmstat.write_text("nr_free_pages 5\noom_kill 3\n")
        patch.setattr(watch, "actors", lambda: self.table)
        patch.setattr(watch, "fetch", self._fetch)
        patch.setattr(watch, "_VMSTAT", self.vmstat)
        patch.setattr(watch, "_PERIOD_S", 0.0)
        self.watch = Watch("http://x", self.lines.append)

    def _fetch(self, url: str, *, timeout_s: float, verify: bool) -> bytes:
        if self.problem is not None:
            raise self.problem
        return b""

    def look(self) -> list[str]:
        self.watch.look()
        told, self.lines[:] = list(self.lines), []
        return told


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_a_crash_is_told_once_with_what_ray_knows(world: World) -> None:
    assert world.look() == []
    world.table = [replace(ENGINE, dead=True, cause=CAUSE)]
    told = world.look()
    assert told == [
        "EngineReplica (pid 7) died: Worker unexpectedly exits with a connection error code 2. End of file."
    ]
    assert world.look() == []


def test_an_actor_that_restarts_has_died(world: World) -> None:
    world.table = [replace(ENGINE, class_name="ServeController", restarts=1, cause=CAUSE)]
    assert world.look()[0].startswith("ServeController (pid 7) died: ")
    assert world.look() == []


def test_the_kernels_killing_is_named(world: World) -> None:
    world.table = [replace(ENGINE, dead=True, cause=CAUSE)]
    world.vmstat.write_text("nr_free_pages 5\noom_kill 4\n")
    (told,) = world.look()
    assert "the kernel's OOM killer killed" in told


def test_who_was_told_to_end_has_not_died(world: World) -> None:
    ended = replace(ENGINE, dead=True, crashed=False)
    left = replace(ENGINE, actor_id="b", dead=True, cause="Worker exit type: INTENDED_USER_EXIT Worker exit detail: x")
    world.table = [ended, left]
    assert world.look() == []


def test_a_gcs_that_does_not_answer_hides_nothing_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(watch, "actors", lambda: [ENGINE] * may_answer.wait())
    monkeypatch.setattr(watch, "_ANSWER_S", 0.0)
    world.problem = ConnectionResetError("reset")
    assert world.look() == ["not ready: reset"]
    may_answer.set()


def test_readiness_is_told_when_it_goes_and_when_it_returns(world: World) -> None:
    world.problem = HttpStatusError(503, b'{"error": {"message": "no engine replica is running"}}')
    assert world.look() == ["not ready: no engine replica is running"]
    world.problem = ConnectionResetError("reset")
    assert world.look() == []
    world.problem = None
    (told,) = world.look()
    assert told.startswith("ready again after ")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_port_that_stays_closed_ends_the_server(world: World, monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    """A server that answers late or with an error is there, and may recover."""
    refused = ConnectionRefusedError(111, "Connection refused")
    world.problem = URLError(refused) if wrapped else refused
    assert world.watch.look() is None
    monkeypatch.setattr(watch, "_MOST_REFUSED_S", 0.0)
    for problem in (HttpStatusError(503, b""), TimeoutError("timed out"), None):
        world.problem = problem
        assert world.watch.look() is None
    world.problem = refused
    lost = world.watch.look()
    assert lost is not None
    assert lost.startswith("http://x has accepted no connection for ")
