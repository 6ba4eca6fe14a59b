"""A frozen process is told from one that is busy, away, or starved."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import tests.quiet_ray  # noqa: F401 (Ray Serve keeps the environment that it is first imported in)
from serve_app.errors import UnavailableError
from serve_app.serving.frozen import FrozenCheck
from serve_app.serving.gcs_watch import GcsWatch

SERVER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(1)
print(flush=True)
while True:
    connection, _ = listener.accept()
    while sys.argv[2] == "busy":
        pass
    try:
        connection.sendall(connection.recv(99))
    except OSError:
        pass  # it was not waited for
    connection.close()
"""
Start = Callable[[str], psutil.Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(kind: str) -> psutil.Process:
        (tmp_path / "s").unlink(missing_ok=True)
        command = [sys.executable, "-c", SERVER, str(tmp_path / "s"), kind]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"\n"
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def looks(check: FrozenCheck, path: Path, seconds: float = 3) -> list[list[int]]:
    """Until the first that finds one, for so long at most."""
    found, end = list[list[int]]([[]]), time.monotonic() + seconds
    while not found[-1] and time.monotonic() < end:
        found.append(check.look(path))
    return found[1:]


def test_a_frozen_process_is_noticed_after_several_requests(start: Start, tmp_path: Path) -> None:
    process, check = start("idle"), FrozenCheck()
    assert check.look(tmp_path / "s") == []
    process.suspend()
    found = looks(check, tmp_path / "s", 60)
    assert found[-1] == [process.pid]
    assert len(found) >= 4
    start("idle")
    assert check.look(tmp_path / "s") == []
    assert check.unanswered == 0


def test_one_that_goes_on_in_time_is_left_alone(start: Start, tmp_path: Path) -> None:
    process, check = start("idle"), FrozenCheck()
    for _ in range(3):
        process.suspend()
        assert looks(check, tmp_path / "s", 0.7)[-1] == []
        assert check.unanswered > 0
        process.resume()
        assert check.look(tmp_path / "s") == []


def test_a_busy_process_is_left_alone(start: Start, tmp_path: Path) -> None:
    check = FrozenCheck()
    start("busy")
    assert not any(looks(check, tmp_path / "s"))
    assert check.unanswered > 0


def test_one_that_has_ended_is_left_to_others(start: Start, tmp_path: Path) -> None:
    process = start("idle")
    process.kill()
    process.wait()
    assert FrozenCheck().look(tmp_path / "s") == []
    assert FrozenCheck().look(tmp_path / "none") == []


def test_a_silent_gcs_turns_readiness_off_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watch = GcsWatch(lambda timeout_s: True, lambda: now[0])
    for answered, ready in [(False, True), (False, True), (True, True), *[(False, True)] * 2, *[(False, False)] * 40]:
        now[0] += 1
        watch.note(answered)
        assert watch.is_silent is not ready
    with pytest.raises(UnavailableError, match="GCS"):
        watch.check_ready()
    watch.note(True)
    watch.check_ready()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "has not answered for" in line]) == 2, "at once, and after 30 s"
    assert lines[-1] == "Ray's GCS answers again after 42 s"
