"""Servers are started, waited for and stopped; what cannot work is said."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from load_tests.servers import ServerCommand, running
from serve_app.launch.ports import free_port
from serve_app.workloads.machine import Meter, tree_usage


@pytest.fixture
def file_server(tmp_path: Path) -> ServerCommand:
    """Python's own file server on a folder with one file in it."""
    port = free_port()
    (tmp_path / "ready").write_text("yes")
    command = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path))
    return ServerCommand("files", command, f"http://127.0.0.1:{port}", "/ready")


def test_a_server_runs_inside_the_block_and_no_longer(file_server: ServerCommand, tmp_path: Path) -> None:
    with running(file_server, tmp_path / "log", limit_s=30) as server:
        assert psutil.pid_exists(server.pid)
        assert server.ready_s > 0
        with pytest.raises(RuntimeError, match="already answers at"), running(file_server, tmp_path / "log2"):
            pass
        meter = Meter(server.pid)
        assert tree_usage(server.pid).processes == 1
        assert meter.read()["server_pss_mib"] > 1
    assert not psutil.pid_exists(server.pid)


def test_a_server_is_stopped_when_the_block_fails(file_server: ServerCommand, tmp_path: Path) -> None:
    with pytest.raises(KeyError), running(file_server, tmp_path / "log", limit_s=30) as server:
        raise KeyError
    assert not psutil.pid_exists(server.pid)


def test_a_server_ends_with_a_run_that_is_killed(file_server: ServerCommand, tmp_path: Path) -> None:
    run = (
        "import sys, threading; from pathlib import Path; from load_tests.servers import ServerCommand, running\n"
        f"with running({file_server!r}, Path({str(tmp_path / 'log')!r}), limit_s=30) as server:\n"
        "    print(server.pid, flush=True); threading.Event().wait()"
    )
    with subprocess.Popen((sys.executable, "-c", run), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert psutil.wait_procs([server], timeout=30)[1] == []


def test_a_server_that_ends_early_is_told(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; print('no such thing'); sys.exit(3)")
    server = ServerCommand("broken", command, f"http://127.0.0.1:{free_port()}", "/ready")
    with pytest.raises(RuntimeError, match="broken ended with status 3"), running(server, tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text() == "no such thing\n"


def test_a_server_that_is_never_ready_is_stopped(file_server: ServerCommand, tmp_path: Path) -> None:
    (tmp_path / "ready").unlink()
    with pytest.raises(RuntimeError, match="not ready after 1 s"), running(file_server, tmp_path / "log", limit_s=1.0):
        pass
