"""An hour of normal operation: chats, clients that disconnect or read slowly, kills and updates.

A replica is killed every 2 minutes, and an update is deployed every 10. Requests arrive at 80 % of
the measured capacity (open loop), and every complete answer is compared with the undisturbed one.
The resources of each process are sampled; `soak_report` checks whether they grow.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import yaml

from load_tests.chaos.experiment import References
from load_tests.chaos.fleet import Fleet, wait_for
from load_tests.chaos.soak_report import Sample, growths
from load_tests.chaos.traffic import Answer, Ask, Outcome, ask, compare, mixed, open_session, send, send_into, text
from load_tests.chaos.updates import Application, Change, end_of_update, set_arg

_LOAD = 0.8
_KILL_EVERY_S, _UPDATE_EVERY_S, _SAMPLE_EVERY_S = 120.0, 600.0, 5.0
_CAPACITY_S, _UPDATE_LIMIT_S, _LAST_ANSWERS_S = 30.0, 240.0, 120.0
_DISTINCT, _MAX_TOKENS = 96, 400
_CONVERSATIONS, _TURNS, _TURN_TOKENS = 16, 4, 120
_LEAVING, _READING_SLOWLY = 0.10, 0.05
_SLOW_BYTES = 20


@dataclass
class _Life:
    """The events so far. Times are in seconds since the start."""

    fleet: Fleet
    rng: Random
    references: References
    asks: list[Ask]
    started: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    left: int = 0
    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    updates: list[tuple[float, str]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.started


class _LeftError(Exception):
    """The client disconnects."""


async def soak(fleet: Fleet, seconds: float, seed: int) -> dict[str, Any]:
    """Learn the undisturbed answers, measure capacity, then run for `seconds`.

    Return the figures.
    """
    rng, references = Random(seed), References()
    async with open_session() as session:
        asks = await references.learn_mixed(session, fleet.url, mixed(rng, _DISTINCT, _MAX_TOKENS))
        asks += await _learn_chats(session, fleet, references, rng)
        rate = _LOAD * await _capacity(session, fleet, asks, rng)
        life = _Life(fleet, rng, references, asks)
        disturbing = [asyncio.create_task(run(life)) for run in (_kill, _update, _sample)]
        await _arrive(life, session, rate, seconds)
        for task in disturbing:
            task.cancel()
        ends = await asyncio.gather(*disturbing, return_exceptions=True)
    await fleet.wait_whole()
    await fleet.wait_idle(60)
    return {
        "path": fleet.path,
        "seconds": seconds,
        "requests_per_s": round(rate, 2),
        **_what_happened(life),
        "broken": [repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)],
        "kills": life.kills,
        "updates": life.updates,
        "growths": growths(life.samples),
        "samples": [asdict(sample) for sample in life.samples],
    }


async def _learn_chats(session: aiohttp.ClientSession, fleet: Fleet, references: References, rng: Random) -> list[Ask]:
    """Return turns of conversations.

    Each prompt is the previous one with its answer and more text.
    """
    turns: list[Ask] = []
    for number in range(_CONVERSATIONS):
        prompt = text(rng, 60)
        for turn in range(_TURNS):
            a = ask(f"chat {number} turn {turn}", prompt, _TURN_TOKENS)
            await references.learn(session, fleet.url, [a])
            answer = references.of(a)
            assert answer is not None
            prompt += answer.texts[0] + text(rng, 40)
            turns.append(a)
    return turns


async def _capacity(session: aiohttp.ClientSession, fleet: Fleet, asks: list[Ask], rng: Random) -> float:
    """Return the requests per second with every slot taken."""
    done = 0

    async def client() -> None:
        nonlocal done
        while True:
            await send(session, fleet.url, rng.choice(asks))
            done += 1

    clients = [asyncio.create_task(client()) for _ in range(fleet.shape.replicas * fleet.shape.slots)]
    await asyncio.sleep(_CAPACITY_S)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await fleet.wait_idle()
    return done / _CAPACITY_S


async def _arrive(life: _Life, session: aiohttp.ClientSession, rate: float, seconds: float) -> None:
    clients: set[asyncio.Task[None]] = set()
    due = life.started
    while life.now < seconds:
        due += life.rng.expovariate(rate)
        await asyncio.sleep(due - time.monotonic())
        clients.add(asyncio.create_task(_client(life, session)))
        clients = {task for task in clients if not task.done()}
    if clients:
        _, hung = await asyncio.wait(clients, timeout=_LAST_ANSWERS_S)
        for task in hung:
            task.cancel()


async def _client(life: _Life, session: aiohttp.ClientSession) -> None:
    """Send one request until it is answered.

    A refused one is sent again after its `Retry-After`.
    """
    a, behaviour = life.rng.choice(life.asks), life.rng.random()
    if behaviour < _LEAVING:
        with suppress(_LeftError):
            life.left += 1
            await send(session, life.fleet.url, a, on_event=_leave_after(life.rng.randrange(1, 20)))
        return
    slow_bytes = _SLOW_BYTES if behaviour < _LEAVING + _READING_SLOWLY else 0
    while True:
        answer = Answer(a)
        try:
            await send_into(answer, session, life.fleet.url, slow_bytes=slow_bytes)
        finally:
            if answer.status != 429:
                life.answers.append(answer)
        if answer.status != 429:
            return
        life.refused += 1
        await asyncio.sleep(answer.retry_after_s or 1)


def _leave_after(events: int) -> Any:
    def on_event(answer: Answer) -> None:
        if answer.events >= events:
            raise _LeftError

    return on_event


async def _kill(life: _Life) -> None:
    """Kill a random ready replica every few minutes, unless it is the last one."""
    while True:
        await asyncio.sleep(_KILL_EVERY_S)
        ready = await asyncio.to_thread(life.fleet.ready_replicas)
        if len(ready) > 1:
            os.kill(life.rng.choice(ready), signal.SIGKILL)
            life.kills.append(round(life.now, 1))


async def _update(life: _Life) -> None:
    """Deploy in turns a change that running engines apply and one that restarts them; then undo
    both."""
    original = life.fleet.config.read_text()
    changes: tuple[Change, ...] = (_set_knob, set_arg("engine.max_wait_s", 1.5))
    applied: list[Change] = []
    while True:
        for change in changes:
            await asyncio.sleep(_UPDATE_EVERY_S)
            applied = [one for one in applied if one is not change] if change in applied else [*applied, change]
            config = yaml.safe_load(original)
            for one in applied:
                one(config["applications"][0])
            said = await _deploy(life.fleet, yaml.safe_dump(config))
            life.updates.append((round(life.now, 1), said))


def _set_knob(application: Application) -> None:
    application["deployments"] = [{"name": "EngineReplica", "user_config": {"waiting_served_ratio": 1.0}}]


async def _deploy(fleet: Fleet, config: str) -> str:
    """Deploy the config through the launcher. Return the last line of the update."""
    log = fleet.config.with_suffix(".log")
    num_lines = len(log.read_text().splitlines())
    fleet.config.write_text(config)
    os.kill(fleet.pid, signal.SIGUSR1)
    await wait_for(lambda: end_of_update(log, num_lines) is not None, "end of the update", _UPDATE_LIMIT_S)
    return end_of_update(log, num_lines) or ""


async def _sample(life: _Life) -> None:
    while True:
        life.samples += await asyncio.to_thread(_sample_all, life)
        await asyncio.sleep(_SAMPLE_EVERY_S)


def _sample_all(life: _Life) -> list[Sample]:
    fleet, taken = life.fleet, []
    roles = {"ingress": fleet.ingress, "proxy": fleet.proxy, "controller": fleet.controller, "replica": fleet.replicas}
    for role, processes in roles.items():
        for process in processes():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                age, rss_mib = time.time() - process.create_time(), process.memory_info().rss / 2**20
                held = round(rss_mib, 1), process.num_fds(), process.num_threads()
                taken.append(Sample(round(life.now, 1), role, process.pid, round(age, 1), *held))
    return taken


def _what_happened(life: _Life) -> dict[str, Any]:
    pairs = [(answer, life.references.of(answer.ask)) for answer in life.answers]
    differences = [(answer, compare(answer, whole)) for answer, whole in pairs if whole is not None]
    failed = [answer for answer in life.answers if answer.outcome is not Outcome.COMPLETE]
    return {
        "answers": len(life.answers),
        "left": life.left,
        "refused_with_retry_after": life.refused,
        "failed": len(failed),
        "failures": dict(Counter(f"{a.outcome.value} {a.detail}"[:160] for a in failed).most_common(8)),
        "lost_tokens": sum(difference.lost for _, difference in differences),
        "doubled_tokens": sum(difference.doubled for _, difference in differences),
        "unequal": sum(not difference.equal for _, difference in differences),
        "longest_silence_s": round(max((a.longest_gap_s for a in life.answers), default=0.0), 1),
        "failovers": (life.fleet.metrics() or {}).get("serve_app_failovers_total"),
    }
