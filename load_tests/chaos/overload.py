"""Ten times the fleet's capacity, for minutes: admitted clients' answers, refusals, and memory.

Capacity is measured first, with as many requests in flight as the fleet holds. Then requests arrive
at ten times that rate, independent of the answers (open loop). A refused client tries once more,
after its `Retry-After`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from load_tests.chaos.fleet import Fleet, NotInTimeError
from load_tests.chaos.traffic import Answer, Ask, Outcome, ask, open_session, send, text
from serve_app.workloads.figures import percentile

_FACTOR = 10
_PROMPT, _OUTPUT = 64, 200
_WARM_UP_S, _SETTLE_S = 10.0, 5.0
_SAMPLE_S = 2.0
_SETTLED_AFTER_S = 60.0
_WANTED_OF_PEAK, _MEMORY_LIMIT = 0.8, 0.02
_LONGEST_RETRY_AFTER_S = 60
_LATE_S = 0.2
"""Clients may return this much later than their `Retry-After`."""


@dataclass
class _Crowd:
    """The answers to all clients."""

    first: list[Answer] = field(default_factory=list)
    """The first try of each client."""
    returned: list[Answer] = field(default_factory=list)
    """The second try of each refused client whose `Retry-After` has passed."""
    retry_after_s: list[float] = field(default_factory=list)
    """The `Retry-After` of each refusal."""
    num_due: int = 0
    """Number of refused clients whose `Retry-After` passed within the run."""


class _Memory:
    """Resident memory of our processes and of Serve's, sampled until the end of the context."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._samples: list[tuple[float, float]] = []

    async def __aenter__(self) -> "_Memory":
        self._start = time.monotonic()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            held = await asyncio.to_thread(self._fleet.holdings)
            total = sum(holding.rss_mib for holding in held.values())
            self._samples.append((time.monotonic() - self._start, total))
            await asyncio.sleep(_SAMPLE_S)

    def figures(self) -> dict[str, Any]:
        """Return the MiB after the first minute, the maximum since then and at the end, and the
        growth relative to the first."""
        settled = [mib for at, mib in self._samples if at >= _SETTLED_AFTER_S]
        if not settled:
            return {"memory_mib": None, "memory_growth": None}
        return {
            "memory_mib": {"first_minute": round(settled[0]), "most": round(max(settled)), "end": round(settled[-1])},
            "memory_growth": round(max(settled) / settled[0] - 1, 4),
        }


async def overload(fleet: Fleet, seconds: float, capacity_s: float, seed: int) -> dict[str, Any]:
    """Measure capacity for `capacity_s` seconds, then offer ten times as much for `seconds`.

    Return the figures.
    """
    rng = Random(seed)
    async with open_session() as session:
        await _closed_loop(session, fleet, _WARM_UP_S, rng)
        peak_tok_s = await _closed_loop(session, fleet, capacity_s, rng)
        # Requests per second are derived from tokens: requests cut off by the end of the
        # measurement count in part.
        rate = _FACTOR * peak_tok_s / _OUTPUT
        async with _Memory(fleet) as memory:
            crowd, tok_s, offered = await _open_loop(session, fleet, rate, seconds, rng)
    await fleet.wait_idle(60)
    return {
        "path": fleet.path,
        "capacity_requests_per_s": round(peak_tok_s / _OUTPUT, 2),
        "offered_requests_per_s": round(offered, 2),
        "seconds": seconds,
        "peak_tok_s": round(peak_tok_s, 1),
        "tok_s": round(tok_s, 1),
        "tok_s_of_peak": round(tok_s / peak_tok_s, 4),
        **_what_happened(crowd),
        **memory.figures(),
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return the expectations that the figures miss, as sentences, without those that were not
    measured."""
    faults = []
    if figures["tok_s_of_peak"] < _WANTED_OF_PEAK:
        faults.append(f"throughput was {figures['tok_s_of_peak']:.1%} of the peak, not {_WANTED_OF_PEAK:.0%}")
    if others := figures["refused"] - figures["refused_with_429"]:
        faults.append(f"{others} first tries ended neither complete nor with 429: {figures['first_tries']}")
    if without := figures["refused_with_429"] - figures["with_retry_after"]:
        faults.append(f"refusals without Retry-After: {without}")
    if (longest := figures["longest_retry_after_s"]) is None:
        faults.append("no refusal had a Retry-After")
    elif longest > _LONGEST_RETRY_AFTER_S:
        faults.append(f"the longest Retry-After was {longest:.0f} s, more than {_LONGEST_RETRY_AFTER_S} s")
    if (growth := figures["memory_growth"]) is None:
        faults.append(f"a run of {figures['seconds']:.0f} s does not show how memory grows after the first minute")
    elif growth > _MEMORY_LIMIT:
        faults.append(f"memory grew by {growth:.1%} after the first minute, more than {_MEMORY_LIMIT:.0%}")
    return faults


async def _closed_loop(session: aiohttp.ClientSession, fleet: Fleet, seconds: float, rng: Random) -> float:
    """Return output tokens per second with every slot taken and some clients waiting."""

    async def client() -> None:
        while True:
            await send(session, fleet.url, _new_request(rng))

    clients = [asyncio.create_task(client()) for _ in range(fleet.shape.max_requests - fleet.shape.queue // 2)]
    await asyncio.sleep(_SETTLE_S)
    tok_s = await _token_rate(fleet, seconds)
    await _end(clients)
    await fleet.wait_idle(60)
    return tok_s


async def _open_loop(
    session: aiohttp.ClientSession, fleet: Fleet, rate: float, seconds: float, rng: Random
) -> tuple[_Crowd, float, float]:
    """Send Poisson arrivals of `rate` clients a second.

    Return the clients, output tokens and clients per second.
    """
    crowd = _Crowd()
    clients: list[asyncio.Task[None]] = []

    async def client() -> None:
        a = _new_request(rng)
        answer = await send(session, fleet.url, a)
        crowd.first.append(answer)
        if answer.status == 429 and answer.retry_after_s is not None:
            crowd.retry_after_s.append(answer.retry_after_s)
            await asyncio.sleep(answer.retry_after_s + rng.uniform(0, _LATE_S))
            crowd.num_due += 1
            crowd.returned.append(await send(session, fleet.url, a))

    async def arrive() -> None:
        due = time.monotonic()
        while True:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.monotonic())
            clients.append(asyncio.create_task(client()))

    arriving = asyncio.create_task(arrive())
    start = time.monotonic()
    tok_s = await _token_rate(fleet, seconds)
    offered = len(clients) / (time.monotonic() - start)
    await _end([arriving, *clients])
    return crowd, tok_s, offered


def _new_request(rng: Random) -> Ask:
    return ask("overload", text(rng, _PROMPT), _OUTPUT, temperature=1, seed=rng.randrange(2**31))


async def _token_rate(fleet: Fleet, seconds: float) -> float:
    before, start = await asyncio.to_thread(_output_tokens, fleet), time.monotonic()
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(_output_tokens, fleet)
    return (after - before) / (time.monotonic() - start)


def _output_tokens(fleet: Fleet) -> float:
    samples = fleet.metrics()
    if samples is None:
        raise NotInTimeError("the ingress does not answer /metrics")
    return samples["serve_app_output_tokens_total"]


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Disconnect all clients, which cancels the running requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _what_happened(crowd: _Crowd) -> dict[str, Any]:
    refused = [answer for answer in crowd.first if answer.outcome is not Outcome.COMPLETE]
    back = Counter(answer.status for answer in crowd.returned)
    return {
        "first_tries": _outcomes(crowd.first),
        "refused": len(refused),
        "refused_with_429": sum(answer.status == 429 for answer in refused),
        "with_retry_after": len(crowd.retry_after_s),
        "retry_after_s": {f"p{p}": percentile(crowd.retry_after_s, p) for p in (1, 50, 99)},
        "longest_retry_after_s": max(crowd.retry_after_s, default=None),
        "due_within_the_run": crowd.num_due,
        "came_back": _outcomes(crowd.returned),
        "came_back_admitted": round(back[200] / len(crowd.returned), 4) if crowd.returned else None,
    }


def _outcomes(answers: Sequence[Answer]) -> dict[str, int]:
    counted = Counter(f"{a.status} {a.outcome.value}" for a in answers if a.outcome is not Outcome.HUNG)
    return dict(counted.most_common())
