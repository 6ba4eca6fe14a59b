"""Real servers in processes of their own: Ray, HAProxy or Ray's proxy, engines; a tiny model, real
HTTP."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from serve_app.launch.ports import free_port
from tests.cli.conftest import tiny_folder

__all__ = ["tiny_folder"]

REPOSITORY = Path(__file__).parents[2]
DEFAULT_PATH = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0"}
# Ray's would kill replicas when the machine is full, whoever filled it.
NO_MEMORY_MONITOR = {"RAY_memory_monitor_refresh_ms": "0"}
START_TIMEOUT_S = 150


@dataclass
class Server:
    """`serve-app serve` in a session of its own, as a terminal would start it."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._family: set[psutil.Process] = set()
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "  curl " in line:
                self._settled.set()
        self._settled.set()

    def wait_ready(self) -> None:
        assert self._settled.wait(START_TIMEOUT_S), self.lines
        assert self.process.poll() is None, self.lines

    def said(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait for a line that holds `text`: lines of other processes come through Ray, later."""
        wait_for(lambda: any(text in line for line in self.lines), f"a line with {text!r}", timeout_s)

    def line_with(self, part: str) -> str:
        """The first one; the log of the request that tried the server may come behind the
        launcher's last line."""
        return next(line for line in self.lines if part in line)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def running(self, name: str) -> list[psutil.Process]:
        """Those of its processes whose command line holds `name`; they come and go while one
        looks."""
        found = []
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """To the launcher alone, or to all of its session's group as a terminal does."""
        self._family.update(self.descendants())
        (os.killpg if group else os.kill)(self.process.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[psutil.Process]]:
        """Signal it and wait; see `wait_stopped`."""
        self.send(number)
        return self.wait_stopped()

    def wait_stopped(self) -> tuple[int, list[psutil.Process]]:
        """Its exit status, and those of its processes that were there at the signal and outlive
        it."""
        try:
            status = self.process.wait(90)
        except subprocess.TimeoutExpired:
            pytest.fail("it did not end:\n" + "\n".join(self.lines))
        finally:
            self.process.kill()
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
        return status, psutil.wait_procs(self._family, timeout=60)[1]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, summed over its labels except `where`, `outcome` and
        `phase`."""
        samples: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith("#") or "_bucket{" in line:
                continue
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            kept = [f'{key}="{text}"' for key, text in re.findall(r'(where|outcome|phase)="(\w+)"', labels or "")]
            key = f"{name}{{{','.join(kept)}}}" if kept else name
            samples[key] = samples.get(key, 0.0) + float(value)
        return samples

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(api_key="none", base_url=f"{self.url}/v1", max_retries=0, timeout=120)


def write_config(
    folder: Path, args: dict[str, Any], port: int, deployments: Sequence[dict[str, Any]] | None = None
) -> Path:
    """deploy/config.yaml with other `args`, and `deployments` if they are given, on another
    port."""
    config = yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] = args
    if deployments is not None:
        config["applications"][0]["deployments"] = deployments
    path = folder / f"config-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(
    config: Path,
    environment: dict[str, str],
    command: tuple[str, str] = ("serve-app", "serve"),
    options: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """`command` (a program of this environment and its verb) with `config`, which may be a model,
    and `options`, in a session of its own.

    It ends with this process, however that ends; Ray's processes end with it.
    """
    program, verb = command
    # A shell starts what runs in its background with SIGINT ignored, which children inherit: `serve
    # run` would not end.
    started = ["setpriv", "--pdeathsig", "KILL", "env", "--default-signal=INT", Path(sys.executable).with_name(program)]
    # The tests' own switches (warnings as errors, coverage) are not for the server.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.Popen(
        [*map(str, started), verb, str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**inherited, **NO_MEMORY_MONITOR, **environment},
        start_new_session=True,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server that the test stops itself, or that is stopped after the test."""
    servers: list[Server] = []

    def start(
        args: dict[str, Any],
        environment: dict[str, str] | None = None,
        deployments: Sequence[dict[str, Any]] | None = None,
        **how: Any,
    ) -> Server:
        port = free_port()
        process = launch(write_config(tmp_path, args, port, deployments), environment or {}, **how)
        server = Server(process, f"http://127.0.0.1:{port}")
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()
        else:
            # a test that failed has not closed its pipe, and the next one would be blamed
            server.wait_stopped()


@contextmanager
def running(process: subprocess.Popen[str], port: int) -> Iterator[Server]:
    """The server of `launch` once it is ready. It is stopped behind the block."""
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


SLOTS, WAITING, QUEUED = 8, 8, 64


@pytest.fixture(scope="session", params=["fast path", "default path"])
def server(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One replica of a tiny model: 8 slots, 8 more requests in the engine, 64 at the ingress."""
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {
            "max_num_seqs": SLOTS,
            "max_num_waiting": WAITING,
            "max_num_batched_tokens": 64,
            "kv_cache_gib": 0.05,
            "num_threads": 1,
        },
        "ingress": {"max_queued_requests": QUEUED, "max_body_mib": 1.0, "failover_wait_s": 120.0},
    }
    port = free_port()
    config = write_config(tmp_path_factory.mktemp("server"), args, port)
    environment = {} if request.param == "fast path" else DEFAULT_PATH
    with running(launch(config, environment), port) as server:
        yield server


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
