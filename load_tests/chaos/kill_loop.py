"""1,000 streams while a random ready replica is killed every few seconds: effects on clients."""

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from load_tests.chaos.experiment import References
from load_tests.chaos.fleet import Fleet
from load_tests.chaos.traffic import Answer, Outcome, compare, mixed, open_session, send
from serve_app.workloads.figures import percentile

_DISTINCT = 96
_MAX_TOKENS = 600
_MUST_BE_NONE = ("failed", "lost_tokens", "doubled_tokens", "unequal")


@dataclass
class _Killer:
    """Kills a random ready replica every `every_s` seconds, unless it is the only one."""

    fleet: Fleet
    every_s: float
    rng: Random
    killed: int = 0
    skipped: int = 0
    struck: int = 0
    """Requests on the killed replicas, as counted by the ingress just before."""
    ready: Counter[int] = field(default_factory=Counter)

    async def run(self) -> None:
        """Kill replicas until cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            ready = await asyncio.to_thread(self.fleet.ready_replicas)
            self.ready[len(ready)] += 1
            if len(ready) < 2:
                self.skipped += 1
                continue
            pid = self.rng.choice(ready)
            self.struck += (await asyncio.to_thread(self.fleet.in_flight)).get(pid, 0)
            os.kill(pid, signal.SIGKILL)
            self.killed += 1


async def kill_loop(fleet: Fleet, requests: int, at_once: int, every_s: float, seed: int) -> dict[str, Any]:
    """Send `requests` streams, `at_once` at a time, and compare each with the undisturbed
    answer."""
    rng = Random(seed)
    references = References()
    async with open_session() as session:
        asks = await references.learn_mixed(session, fleet.url, mixed(rng, _DISTINCT, _MAX_TOKENS))
        order = iter(range(requests))
        answers: list[Answer] = []

        async def worker() -> None:
            for index in order:
                answers.append(await send(session, fleet.url, asks[index % len(asks)]))

        killer = _Killer(fleet, every_s, rng)
        killing = asyncio.create_task(killer.run())
        start = time.monotonic()
        try:
            await asyncio.gather(*(worker() for _ in range(at_once)))
        finally:
            seconds = time.monotonic() - start
            killing.cancel()
    await fleet.wait_whole()
    await fleet.wait_idle()
    return _figures(answers, references, fleet) | {
        "at_once": at_once,
        "killed": killer.killed,
        "skipped": killer.skipped,
        "requests_struck": killer.struck,
        "ready_at_kill_time": dict(sorted(killer.ready.items())),
        "seconds": round(seconds, 1),
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return the expectations that the figures miss, as sentences."""
    faults = [f"{figures[name]} {name.replace('_', ' ')}" for name in _MUST_BE_NONE if figures[name]]
    if not figures["killed"]:
        faults.append("no replica was killed")
    return faults


def _figures(answers: list[Answer], references: References, fleet: Fleet) -> dict[str, Any]:
    differences = [(a, compare(a, r)) for a in answers if (r := references.of(a.ask)) is not None]
    complete = [answer for answer in answers if answer.outcome is Outcome.COMPLETE]
    # Reported apart, since it contains the wait in the queue: many wait for the one replica that is
    # left.
    first = [answer.first_event_at - answer.started_at for answer in complete if answer.first_event_at is not None]
    silences = [answer.longest_gap_s for answer in complete]
    failed = [answer for answer in answers if answer.outcome is not Outcome.COMPLETE]
    return {
        "path": fleet.path,
        "requests": len(answers),
        "failed": len(failed),
        "failures": dict(Counter(f"{a.outcome.value} {a.detail}"[:160] for a in failed).most_common(8)),
        "lost_tokens": sum(difference.lost for _, difference in differences),
        "doubled_tokens": sum(difference.doubled for _, difference in differences),
        "unequal": sum(not difference.equal for _, difference in differences),
        "unequal_requests": sorted({a.ask.name for a, difference in differences if not difference.equal})[:8],
        "output_tokens": sum(a.usage[1] for a in answers if a.usage is not None),
        "first_event_s": {f"p{p}": percentile(first, p) for p in (50, 90, 99, 100)},
        "longest_silence_s": {f"p{p}": percentile(silences, p) for p in (50, 90, 99, 100)},
        "failovers": (fleet.metrics() or {}).get("serve_app_failovers_total"),
    }
