"""Starting a server on loopback, waiting until it answers, and stopping exactly what was
started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.system.http_client import HttpStatusError, fetch
from serve_app.workloads.client import Server

_POLL_S = 0.2
_STOP_LIMIT_S = 60.0
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server and how to talk to it. `model` is the name to send ("" = the first that
    it lists)."""

    name: str
    command: tuple[str, ...]
    base_url: str
    ready_path: str
    model: str = ""
    extra_body: dict[str, Any] = field(default_factory=dict)
    extensions: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def client(self) -> Server:
        """How a client addresses this server."""
        return Server(self.base_url, self.model, self.extra_body, self.extensions)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A started server: its process id, and the seconds from start to ready."""

    pid: int
    ready_s: float


@contextmanager
def running(server: ServerCommand, log: Path, limit_s: float = 300.0) -> Iterator[RunningServer]:
    """Start the server, wait until `ready_path` answers 200, and stop it at the end.

    Its output goes to `log`. It ends with the thread that this is called in, however that ends.
    Raises `RuntimeError` when it ends early, is not ready within `limit_s` seconds, or when another
    server already answers at its address."""
    url = server.base_url + server.ready_path
    if _status(url) is not None:
        raise RuntimeError(f"another server already answers at {server.base_url}")
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            (*_ENDS_WITH_US, *server.command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
        try:
            while _status(url) != 200:
                if process.poll() is not None:
                    raise RuntimeError(f"{server.name} ended with status {process.returncode}; see {log}")
                if time.monotonic() - started > limit_s:
                    raise RuntimeError(f"{server.name} was not ready after {limit_s:.0f} s; see {log}")
                time.sleep(_POLL_S)
            yield RunningServer(process.pid, time.monotonic() - started)
        finally:
            _stop(process)


def _status(url: str) -> int | None:
    """Return the HTTP status of a GET (200 for any success), or None if no server listens."""
    try:
        fetch(url, timeout_s=5)
    except HttpStatusError as error:
        return error.status
    except OSError:
        return None
    return 200


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process; once it has ended or the limit is over, SIGKILL to the rest of its
    process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
