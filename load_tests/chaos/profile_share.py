"""The share of the servers' CPU time that failover and observability cost, by sampling stacks.

A sample counts for a part if our innermost frame belongs to that part and no frame of Ray's is
below it. Then the interpreter runs the part's own bookkeeping, or the standard library or the
Prometheus client for it. All of a part's modules count, even code that a server without the part
would need elsewhere. Reading a link's frames counts, since they contain heartbeats; writing them
does not, since under load they are sent for the tokens. Samples of a thread are weighted by its CPU
time. No fault is injected. Metrics are scraped at the interval of deploy/prometheus.yml.
"""

import asyncio
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import yaml

from load_tests.chaos.fleet import REPOSITORY, Fleet
from load_tests.chaos.traffic import ask, open_session, send, text

_HERTZ = 200
_SETTLE_S = 5.0
_PROMPT, _OUTPUT = 64, 200
_FAILOVER_LIMIT = 0.01


@dataclass(frozen=True)
class Part:
    """A part of the code: whole modules of ours, and single functions of others."""

    modules: frozenset[str]
    functions: frozenset[str]

    def has(self, name: str) -> bool:
        """Whether `module.function` belongs to this part."""
        return name.partition(".")[0] in self.modules or name in self.functions


PARTS = {
    "failover": Part(
        modules=frozenset({"resume_state", "failover", "attempt", "watchdog", "replica_set"}),
        functions=frozenset(
            {
                *("replica._heartbeat", "replica._load", "wire.pack_load", "wire.unpack_load"),
                *("link._head", "link.data_received", "transport.heard"),
            }
        ),
    ),
    # Metrics and step records. The scheduler's state is read for every record.
    "observation": Part(
        modules=frozenset({"metrics", "metrics_port", "step_ring", "tracking", "scraping"}),
        functions=frozenset({"core._record", "core._report", "replica._on_step", "scheduler.stats"}),
    ),
}
_FRAME = re.compile(r"([^;\s]+) \(([^;]+?):\d+\)")
# The standard library serves only the metrics ports, and its own work has no frame of ours.
_METRICS_PORT = "socketserver.py"


async def profile_share(fleet: Fleet, seconds: float, seed: int) -> dict[str, Any]:
    """Keep every slot taken and sample ingress and replicas for `seconds`.

    Return the shares of CPU time.
    """
    rng = Random(seed)

    async def client() -> None:
        while True:
            seed = rng.randrange(2**31)
            await send(session, fleet.url, ask("load", text(rng, _PROMPT), _OUTPUT, temperature=1, seed=seed))

    async with open_session() as session:
        tasks = [asyncio.create_task(client()) for _ in range(fleet.shape.replicas * fleet.shape.slots)]
        tasks.append(asyncio.create_task(_scrape(session, fleet.url)))
        await asyncio.sleep(_SETTLE_S)
        processes = [*fleet.ingress(), *fleet.replicas()]
        results = await asyncio.gather(*(_sample(process, seconds, fleet.config.parent) for process in processes))
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    if failures := [error for error in ended if isinstance(error, Exception)]:
        raise failures[0]
    total = sum(sampled.cpu_s for sampled in results)
    return {
        "path": fleet.path,
        "seconds": seconds,
        "cpu_s": round(total, 2),
        "samples": sum(sampled.count for sampled in results),
        **{part: _weighed(part, results, total) for part in PARTS},
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return the expectations that the figures miss, as sentences."""
    share = figures["failover"]["share"]
    if share <= _FAILOVER_LIMIT:
        return []
    return [f"failover takes {share:.2%} of the CPU time, more than {_FAILOVER_LIMIT:.0%}"]


async def _scrape(session: aiohttp.ClientSession, url: str) -> None:
    """Scrape the metrics of every process, as Prometheus does."""
    config = yaml.safe_load((REPOSITORY / "deploy" / "prometheus.yml").read_text())
    interval_s = float(config["global"]["scrape_interval"].removesuffix("s"))
    while True:
        async with session.get(f"{url}/metrics/targets") as response:
            addresses = [target for group in await response.json() for target in group["targets"]]
        for address in addresses:
            async with session.get(f"http://{address}/metrics") as response:
                response.raise_for_status()
                await response.read()
        await asyncio.sleep(interval_s)


@dataclass(frozen=True)
class _Sampled:
    """One process: its CPU time, number of sampled stacks, and each part's share by function."""

    cpu_s: float
    count: int
    shares: dict[tuple[str, str], float]


def _weighed(part: str, results: list[_Sampled], total_cpu_s: float) -> dict[str, Any]:
    functions: Counter[str] = Counter()
    for sampled in results:
        for (owner, name), share in sampled.shares.items():
            if owner == part:
                functions[name] += share * sampled.cpu_s / total_cpu_s  # type: ignore[assignment]
    most = {name: round(share, 5) for name, share in functions.most_common(12)}
    return {"share": round(sum(functions.values()), 5), "by_function": most}


async def _sample(process: psutil.Process, seconds: float, folder: Path) -> _Sampled:
    """Sample the process with py-spy `_HERTZ` times a second.

    Raises `RuntimeError` if that fails.
    """
    output = folder / f"{process.pid}.stacks"
    before = _thread_seconds(process)
    spy = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(process.pid), "--format", "raw"),
        *("--threads", "--rate", str(_HERTZ), "--duration", str(int(seconds)), "--nonblocking"),
        *("--output", str(output)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await spy.communicate()
    if spy.returncode:
        raise RuntimeError(f"py-spy: {errors.decode()[-500:]}")
    used = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in _thread_seconds(process).items()}
    stacks = {stack: int(count) for stack, _, count in (line.rpartition(" ") for line in output.open())}
    # py-spy takes some sleeping threads for busy ones, so a thread's samples are weighted by its
    # own CPU time.
    samples: Counter[int] = Counter()
    for stack, count in stacks.items():
        samples[_thread(stack)] += count
    total, shares = sum(used.values()), Counter[tuple[str, str]]()
    for stack, count in stacks.items():
        if (owner := owner_of(stack)) is not None and total:
            # Ray's threads are rarely in Python, so a sample counts for at most the time to the
            # next one.
            worth_s = min(used.get(_thread(stack), 0.0) / samples[_thread(stack)], 1 / _HERTZ)
            shares[owner] += count * worth_s / total  # type: ignore[assignment]
    return _Sampled(total, sum(samples.values()), dict(shares))


def _thread_seconds(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _thread(stack: str) -> int:
    """Return the kernel's id of the thread, which py-spy writes before the frames."""
    found = re.match(r"thread \((0x[0-9A-Fa-f]+|\d+)\)", stack)
    return int(found[1], 0) if found is not None else 0


def owner_of(stack: str) -> tuple[str, str] | None:
    """Return the (part, `module.function`) to which a stack belongs; None for other stacks.

    stack: outermost frame first, as py-spy writes it.
    """
    frames = _FRAME.findall(stack)
    for function, file in reversed(frames):
        if "ray/" in file:
            return None
        if "serve_app/" in file:
            # Python 3.11 puts the class before it
            name = f"{Path(file).stem}.{function.rpartition('.')[2]}"
            return next(((part, name) for part in PARTS if PARTS[part].has(name)), None)
    if any(file.endswith(_METRICS_PORT) for _, file in frames):
        return "observation", "the metrics port"
    return None
