"""Which part of the servers' processor time failover costs while nothing fails, by sampling their stacks under load.

A sample counts as failover's when the innermost frame of ours is one of its own and no frame of Ray's lies below it:
then the interpreter is in the journal, the attempts' bookkeeping or the heartbeats, or in the standard library for
them. All of those modules counts, also what a server without failover would need in another place.
"""

import asyncio
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped]

from load_tests.chaos.fleet import Fleet
from load_tests.chaos.traffic import ask, open_session, send, text

_HERTZ = 200
_SETTLE_S = 5.0
_PROMPT, _OUTPUT = 64, 200
_MODULES = frozenset({"journal", "failover", "attempt", "watchdog", "replica_set"})
_FUNCTIONS = frozenset({"replica.feed", "replica._load", "wire.pack_load", "wire.unpack_load"})
_FRAME = re.compile(r"([^;\s]+) \(([^;]+?):\d+\)")


async def profile_share(fleet: Fleet, seconds: float, folder: Path, seed: int) -> dict[str, Any]:
    """Keep every seat taken, sample ingress and replicas for `seconds`, and weigh samples by processor time."""
    rng = Random(seed)

    async def client() -> None:
        while True:
            seed = rng.randrange(2**31)
            await send(session, fleet.url, ask("load", text(rng, _PROMPT), _OUTPUT, temperature=1, seed=seed))

    async with open_session() as session:
        clients = [asyncio.create_task(client()) for _ in range(fleet.shape.replicas * fleet.shape.seats)]
        await asyncio.sleep(_SETTLE_S)
        processes = [*fleet.ingress(), *fleet.replicas()]
        results = await asyncio.gather(*(_sample(process, seconds, folder) for process in processes))
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    total = sum(sampled.cpu_s for sampled in results)
    functions: dict[str, float] = {}
    for sampled in results:
        for name, part in sampled.failover.items():
            functions[name] = functions.get(name, 0.0) + part * sampled.cpu_s / total
    most = sorted(functions.items(), key=lambda item: -item[1])[:12]
    return {
        "path": fleet.path,
        "seconds": seconds,
        "cpu_s": round(total, 2),
        "samples": sum(sampled.count for sampled in results),
        "failover_share": round(sum(functions.values()), 5),
        "by_function": {name: round(share, 5) for name, share in most},
    }


@dataclass(frozen=True)
class _Sampled:
    """One process: its processor time, how many stacks were seen, and which part of them is failover's, by function."""

    cpu_s: float
    count: int
    failover: dict[str, float]


async def _sample(process: psutil.Process, seconds: float, folder: Path) -> _Sampled:
    """Have py-spy look at the process `_HERTZ` times a second. Raises `RuntimeError` when it cannot."""
    output = folder / f"{process.pid}.stacks"
    before = sum(process.cpu_times()[:2])
    spy = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(process.pid), "--format", "raw"),
        *("--rate", str(_HERTZ), "--duration", str(int(seconds)), "--nonblocking", "--output", str(output)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await spy.communicate()
    if spy.returncode:
        raise RuntimeError(f"py-spy: {told.decode()[-500:]}")
    cpu_s = sum(process.cpu_times()[:2]) - before
    stacks = {stack: int(count) for stack, _, count in (line.rpartition(" ") for line in output.open())}
    total = sum(stacks.values())
    functions: Counter[str] = Counter()
    for stack, count in stacks.items():
        if (name := failover_function(stack)) is not None:
            functions[name] += count
    return _Sampled(cpu_s, total, {name: count / total for name, count in functions.items()})


def failover_function(stack: str) -> str | None:
    """`module.function` if this stack (outermost frame first, as py-spy writes it) is failover's, else None."""
    for frame in reversed(_FRAME.findall(stack)):
        function, file = frame
        if "ray/" in file:
            return None
        if "serve_app/" in file:
            name = f"{Path(file).stem}.{function}"
            return name if Path(file).stem in _MODULES or name in _FUNCTIONS else None
    return None
