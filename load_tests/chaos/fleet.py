"""A real fleet on a local Ray cluster, observed from outside: processes, metrics, resources.

Starts the fleet and identifies its processes. Injects no faults.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml
from prometheus_client.parser import text_string_to_metric_families

from load_tests.chaos.traffic import MODEL
from load_tests.servers import ServerCommand, running
from serve_app.environment import FAST_PATH_ENVIRONMENT, LAUNCHER_ENVIRONMENT
from serve_app.launch.ports import free_port
from serve_app.system.http_client import fetch

REPOSITORY = Path(__file__).parents[2]
PATHS = ("fast", "default")
SERVE_APP = (sys.executable, "-m", "serve_app.cli")
"""The `serve-app` command, which works without its installed script."""
# Ray's memory monitor would kill replicas when the machine is full, whatever filled it.
_NO_MEMORY_MONITOR = {"RAY_memory_monitor_refresh_ms": "0"}
_POLL_S = 0.1
_SCRAPE_TIMEOUT_S = 5.0
_IDLE = (
    "serve_app_requests_running",
    "serve_app_requests_waiting",
    "serve_app_kv_blocks_used",
    "serve_app_ingress_queue_depth",
    "serve_app_ingress_requests_ongoing",
    "serve_app_requests_active",
)

_ON_NODES = (
    {"name": "EngineReplica", "ray_actor_options": {"num_cpus": 0, "resources": {"engine": 1}}},
    {"name": "Ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}},
)

Samples = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """The size of the fleet.

    A replica's KV pool holds about 18,600 tokens of the small model in 8 bits, 10,500 in 16.
    """

    replicas: int = 3
    slots: int = 8
    waiting: int = 8
    queue: int = 64
    kv_cache_gib: float = 0.01
    step_tokens: int = 64
    failover_wait_s: float = 30.0

    @property
    def max_requests(self) -> int:
        """Maximum number of requests in the fleet; one more is refused."""
        return self.replicas * (self.slots + self.waiting) + self.queue

    def args(self, model: str) -> dict[str, Any]:
        """Return the application's `args`. Settings that are not named have their defaults."""
        return {
            "model": model,
            "served_model_name": MODEL,
            "device": "cpu",
            "num_replicas": self.replicas,
            "engine": {
                "max_num_seqs": self.slots,
                "max_num_waiting": self.waiting,
                "max_num_batched_tokens": self.step_tokens,
                "kv_cache_gib": self.kv_cache_gib,
                "num_threads": 1,
            },
            "ingress": {"max_queued_requests": self.queue, "failover_wait_s": self.failover_wait_s},
        }


@dataclass(frozen=True)
class Holding:
    """The resources of one process."""

    fds: int
    threads: int
    rss_mib: float
    tasks: float
    """Tasks of the ingress's event loop; 0 for other processes, which do not report them."""
    is_proxy: bool


@dataclass
class Fleet:
    """A running application: the process `pid` and all its descendants."""

    url: str
    pid: int
    path: str
    shape: Shape
    config: Path
    environment: dict[str, str]

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the fleet's living processes whose command line matches the pattern `title`."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                if re.search(title, " ".join(process.cmdline())) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of engine replicas, ready or not."""
        return self.processes(r"^ray::ServeReplica:\w+:EngineReplica")

    def ingress(self) -> list[psutil.Process]:
        """Return the processes of ingress replicas."""
        return self.processes(r"^ray::ServeReplica:\w+:Ingress")

    def controller(self) -> list[psutil.Process]:
        """Return Serve's controller."""
        return self.processes(r"^ray::ServeController")

    def proxy(self) -> list[psutil.Process]:
        """Return the process that accepts HTTP: HAProxy on the fast path, Ray's Python proxy
        otherwise."""
        haproxy = self.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        return self.processes(r"haproxy.* -f " if haproxy else r"^ray::ProxyActor")

    def nodes(self) -> list[psutil.Process]:
        """Return the raylet of every Ray node, the ancestor of all other processes of the node."""
        return self.processes(r"/raylet ")

    def family(self) -> list[psutil.Process]:
        """Return the launcher and all its descendants."""
        launcher = psutil.Process(self.pid)
        return [launcher, *launcher.children(recursive=True)]

    def wait_gone(self, family: Sequence[psutil.Process], limit_s: float = 90.0) -> tuple[int | None, list[int]]:
        """Return the launcher's exit status (None while it runs) and living pids of `family`."""
        gone, left = psutil.wait_procs(family, timeout=limit_s)
        status = next((process.returncode for process in gone if process.pid == self.pid), None)
        return status, [process.pid for process in left]

    def ready_replicas(self) -> list[int]:
        """Return the pids of the living replicas that the ingress may send requests to."""
        listed = self.listed()
        ready = {replica["pid"] for replica in listed if replica["condition"] == "ok" and not replica["leaving"]}
        return sorted(ready & {process.pid for process in self.replicas()})

    def in_flight(self) -> dict[int, int]:
        """Return the number of requests in flight by pid, for replicas that the ingress considers
        healthy."""
        return {replica["pid"]: replica["in_flight"] for replica in self.listed() if replica["condition"] == "ok"}

    def listed(self) -> list[dict[str, Any]]:
        page = _get(f"{self.url}/debug/replicas", _SCRAPE_TIMEOUT_S)
        try:
            return [] if page is None else list(json.loads(page))
        except ValueError:
            print(f"/debug/replicas answered {page!r:.200}", file=sys.stderr, flush=True)
            return []

    def metrics(self, **labels: str) -> Samples | None:
        """Return the application's metrics, summed over other labels; None without an answer."""
        page = _get(f"{self.url}/metrics", _SCRAPE_TIMEOUT_S)
        return None if page is None else _samples(page, labels)

    def computes_beyond(self, position: int) -> int | None:
        """Return the pid of a replica whose latest steps computed a token beyond this position;
        None if there is none."""
        page = _get(f"{self.url}/debug/timeline?seconds=0.5", _SCRAPE_TIMEOUT_S)
        recordings = [] if page is None else json.loads(page)["replicas"]
        pids = {replica["id"]: replica["pid"] for replica in self.listed()}
        for recording in recordings:
            starts = (start for record in recording["records"] for _, _, _, start, *_ in record["rows"])
            if max(starts, default=0) > position:
                return pids.get(recording["replica"])
        return None

    def busy(self) -> Samples:
        """Return the gauges that must be zero without requests and are not.

        `{"metrics": nan}` while there are no metrics.
        """
        samples = self.metrics()
        if samples is None:
            return {"metrics": float("nan")}
        return {name: samples[name] for name in _IDLE if samples.get(name, 0.0) != 0.0}

    def holdings(self) -> dict[int, Holding]:
        """Return the resources of our processes and of Serve's, by pid."""
        held = {}
        tasks = (self.metrics() or {}).get("serve_app_ingress_tasks", 0.0)
        ingress, proxy = self.ingress(), self.proxy()
        for process in [*ingress, *self.replicas(), *self.controller(), *proxy]:
            try:
                held[process.pid] = Holding(
                    process.num_fds(),
                    process.num_threads(),
                    process.memory_info().rss / 2**20,
                    tasks if process in ingress else 0.0,
                    process in proxy,
                )
            except psutil.NoSuchProcess:
                continue
        return held

    async def wait_whole(self, limit_s: float = 120.0) -> float:
        """Wait until every replica is ready and no other process is left.

        Return the seconds it took.
        """
        try:
            return await wait_for(
                lambda: len(self.ready_replicas()) == self.shape.replicas == len(self.replicas()),
                f"{self.shape.replicas} replicas ready",
                limit_s,
            )
        except NotInTimeError as error:
            pids = [process.pid for process in self.replicas()]
            raise NotInTimeError(f"{error}; processes {pids}, and the ingress knows {self.listed()}") from None

    async def wait_idle(self, limit_s: float = 30.0) -> float:
        """Wait until nothing runs, waits or holds blocks. Return the seconds it took."""
        return await wait_for(lambda: not self.busy(), "idle", limit_s)


class NotInTimeError(Exception):
    """An awaited condition did not hold in time."""


async def wait_for(condition: Callable[[], bool], what: str, limit_s: float) -> float:
    """Evaluate `condition` in a thread until it holds. Return the seconds it took.

    Raises `NotInTimeError`.
    """
    start = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - start > limit_s:
            raise NotInTimeError(f"not within {limit_s:.0f} s: {what}")
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - start


def path_environment(path: str) -> dict[str, str]:
    """Return the environment that puts Ray Serve on its fast or its default path."""
    switches = dict.fromkeys(FAST_PATH_ENVIRONMENT, "0") if path == "default" else FAST_PATH_ENVIRONMENT
    return {**_NO_MEMORY_MONITOR, **switches}


@asynccontextmanager
async def serving(path: str, model: str, folder: Path, shape: Shape) -> AsyncIterator[Fleet]:
    """Run `serve-app serve` with `shape` on Ray's `path` ("fast" or "default").

    Its log and config go to `folder`.
    """
    config_path = write_config(folder / f"{path}.yaml", shape.args(model))
    port = yaml.safe_load(config_path.read_text())["http_options"]["port"]
    command = ServerCommand(
        name=f"serve_app on the {path} path",
        command=(*SERVE_APP, "serve", str(config_path)),
        base_url=f"http://127.0.0.1:{port}",
        ready_path="/health/ready",
        environment=path_environment(path),
    )
    async with _entered(command, folder / f"{path}.log") as pid:
        fleet = Fleet(command.base_url, pid, path, shape, config_path, path_environment(path))
        await fleet.wait_whole()
        yield fleet


@asynccontextmanager
async def serving_on_nodes(path: str, model: str, folder: Path, shape: Shape) -> AsyncIterator[Fleet]:
    """Run the application on a cluster of four nodes (`cluster`), submitted with `serve run`.

    HTTP goes through Ray's Python proxy on both paths, because HAProxy's ports would be open on
    every interface.
    """
    environment = path_environment(path) | dict(LAUNCHER_ENVIRONMENT) | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    config_path = write_config(folder / f"nodes-{path}.yaml", shape.args(model), _ON_NODES)
    config = yaml.safe_load(config_path.read_text())
    with (folder / f"nodes-{path}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "load_tests.chaos.cluster"),
            env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode()
        address = line.rpartition(" ")[2].strip()
        await submit(config_path, address, environment)
        url = f"http://127.0.0.1:{config['http_options']['port']}"
        fleet = Fleet(url, process.pid, path, shape, config_path, environment)
        await fleet.wait_whole()
        yield fleet
    finally:
        process.terminate()
        await process.wait()


async def submit(config: Path, address: str, environment: Mapping[str, str]) -> None:
    """Run a config with `serve run` on the Ray cluster at `address`.

    Raises `RuntimeError` if Serve refuses it.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", "--address", address, str(config)),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"serve run: {output.decode()[-500:]}")


def write_config(path: Path, args: dict[str, Any], deployments: Sequence[dict[str, Any]] = ()) -> Path:
    """Write deploy/config.yaml with other `args` and on a free port. Return its path."""
    config = yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    application = config["applications"][0]
    application["args"] = args
    if deployments:
        application["deployments"] = list(deployments)
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def _entered(command: ServerCommand, log: Path) -> AsyncIterator[int]:
    """Run the command like `running`, but wait in threads."""
    context = running(command, log)
    server = await asyncio.to_thread(context.__enter__)
    try:
        yield server.pid
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def _get(url: str, timeout_s: float) -> str | None:
    try:
        return fetch(url, timeout_s=timeout_s).decode()
    except (OSError, ValueError):
        return None


def _samples(page: str, labels: Mapping[str, str]) -> Samples:
    """Return samples with these labels, summed over all others, without histogram buckets."""
    samples: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.endswith("_bucket") and labels.items() <= sample.labels.items():
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples
