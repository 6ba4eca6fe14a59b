"""Clients that make the ingress hold as much memory as possible: its growth, and effects on others.

Some clients never read their answers, which have 64 choices with 20 log-probabilities per token.
Others send bodies of 4 MiB in a loop. The longest gaps of ordinary streams are compared with those
of a run without such clients. The hostile clients are a separate process of low priority, since
real ones would not compete with the server for its CPU.
"""

import asyncio
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]

from load_tests.chaos.fleet import Fleet
from load_tests.chaos.traffic import MODEL, Answer, Outcome, ask, open_narrow_session, open_session, send, text

_READERS, _SENDERS, _STREAMS = 200, 100, 4
_CHOICES = 64
PLACES = _READERS * _CHOICES + _STREAMS
"""Size of the ingress's queue, in which all readers fit."""
_BODY_BYTES = 4 * 2**20 - 1024
_OUTPUT = 400
_PAUSE_S = 0.2
_READING_NOTHING_S = 60.0
_SAMPLE_S = 0.5
_SETTLE_S = 5.0
_GROWTH_LIMIT_MIB, _GAP_LIMIT_S = 256, 0.1


async def memory(fleet: Fleet, seconds: float, seed: int) -> dict[str, Any]:
    """Run ordinary streams alone for a quarter of `seconds`, then `seconds` beside hostile clients.

    Return the figures.
    """
    rng = Random(seed)
    ingress = fleet.ingress()[0]
    async with open_session() as session:
        alone = await _ordinary(session, fleet, seconds / 4, rng)
        before = _rss_mib(ingress)
        most = _Most(ingress)
        sampling = asyncio.create_task(most.sample())
        async with _hostile_process(fleet.url, rng.randrange(2**31)) as bodies:
            await asyncio.sleep(_SETTLE_S)
            beside = await _ordinary(session, fleet, seconds, rng)
        sampling.cancel()
    await fleet.wait_idle(60)
    return {
        "path": fleet.path,
        "seconds": seconds,
        "ingress_replaced": [process.pid for process in fleet.ingress()] != [ingress.pid],
        "ingress_mib": {"before": round(before), "most": round(most.mib), "after": round(_rss_mib(ingress))},
        "growth_mib": round(most.mib - before),
        "streams": _told(alone),
        "streams_beside": _told(beside),
        "bodies": dict(bodies.most_common()),
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return the expectations that the figures miss, as sentences."""
    faults = []
    if figures["ingress_replaced"]:
        faults.append("the ingress did not survive it")
    if figures["growth_mib"] > _GROWTH_LIMIT_MIB:
        faults.append(f"the ingress grew by {figures['growth_mib']} MiB, more than {_GROWTH_LIMIT_MIB}")
    gap = figures["streams_beside"]["longest_gap_s"] - figures["streams"]["longest_gap_s"]
    if gap > _GAP_LIMIT_S:
        faults.append(f"the longest gap of an ordinary stream grew by {gap:.3f} s, more than {_GAP_LIMIT_S}")
    if failed := figures["streams_beside"]["failed"]:
        faults.append(f"{len(failed)} ordinary streams failed: {failed[0]}")
    if strange := [outcome for outcome in figures["bodies"] if outcome[0] not in "4"]:
        faults.append(f"bodies were answered with {strange}")
    return faults


async def _ordinary(session: aiohttp.ClientSession, fleet: Fleet, seconds: float, rng: Random) -> list[Answer]:
    """Run a few streams at a time until `seconds` have passed. Return their answers."""
    answers: list[Answer] = []
    until = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            a = ask("ordinary", text(rng, 64), _OUTPUT, temperature=1, seed=rng.randrange(2**31))
            answers.append(await send(session, fleet.url, a, headers={"Authorization": "Bearer ordinary"}))

    await asyncio.gather(*(client() for _ in range(_STREAMS)))
    return answers


def _told(answers: list[Answer]) -> dict[str, Any]:
    done = [answer for answer in answers if answer.outcome is Outcome.COMPLETE]
    failed = [f"{answer.outcome.value} {answer.detail}" for answer in answers if answer.outcome is not Outcome.COMPLETE]
    gap = max((answer.longest_gap_s for answer in done), default=0.0)
    return {"complete": len(done), "failed": failed, "longest_gap_s": round(gap, 3)}


@asynccontextmanager
async def _hostile_process(url: str, seed: int) -> AsyncIterator[Counter[str]]:
    """Run the hostile clients in this context.

    Afterwards the counter has the answers to their bodies.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_hostile, args=(url, seed, theirs), daemon=True)
    process.start()
    bodies: Counter[str] = Counter()
    try:
        yield bodies
    finally:
        ours.send("enough")
        bodies.update(await asyncio.to_thread(ours.recv))
        await asyncio.to_thread(process.join)


def _be_hostile(url: str, seed: int, connection: Connection) -> None:
    os.nice(10)
    asyncio.run(_attack(url, Random(seed), connection))


async def _attack(url: str, rng: Random, connection: Connection) -> None:
    bodies: Counter[str] = Counter()
    content = [_long_prompt(), _many_parts(), _many_ids()]
    async with open_session() as session:
        clients = [asyncio.create_task(_read_nothing(url, rng.randrange(2**31))) for _ in range(_READERS)]
        for index in range(_SENDERS):
            clients.append(asyncio.create_task(_send_bodies(session, url, content[index % len(content)], bodies)))
        await asyncio.to_thread(connection.recv)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    connection.send(dict(bodies))


async def _read_nothing(url: str, seed: int) -> None:
    """Request a large streamed answer and read none of it. Repeat when the server ends it."""
    body = ask("unread", "Tell me everything.", 195, temperature=1, seed=seed, n=_CHOICES, logprobs=20).body
    while True:
        with suppress(aiohttp.ClientError, OSError):
            async with open_narrow_session() as session, session.post(f"{url}/v1/completions", json=body):
                await asyncio.sleep(_READING_NOTHING_S)
        await asyncio.sleep(_PAUSE_S)


async def _send_bodies(session: aiohttp.ClientSession, url: str, content: bytes, outcomes: Counter[str]) -> None:
    """Send `content` in a loop and count the answers."""
    headers = {"Content-Type": "application/json"}
    while True:
        try:
            async with session.post(f"{url}/v1/chat/completions", data=content, headers=headers) as response:
                answer = json.loads(await response.read())
                outcomes[f"{response.status} {answer['error']['code']}"] += 1
        except (aiohttp.ClientError, OSError) as error:
            outcomes[f"4?? {type(error).__name__}"] += 1
        except (ValueError, KeyError) as error:
            outcomes[f"{response.status} not a typed error: {error!r}"] += 1
        await asyncio.sleep(_PAUSE_S)


def _chat(content: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode()


def _long_prompt() -> bytes:
    return _chat("q" * _BODY_BYTES)


def _many_parts() -> bytes:
    part = {"type": "text", "text": "q"}
    return _chat([part] * (_BODY_BYTES // len(json.dumps(part) + ", ") - 8))


def _many_ids() -> bytes:
    return json.dumps({"model": MODEL, "messages": [], "stop_token_ids": [7] * (_BODY_BYTES // 3 - 64)}).encode()


class _Most:
    """The maximum of a process's resident memory."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.mib = _rss_mib(process)

    async def sample(self) -> None:
        while True:
            self.mib = max(self.mib, _rss_mib(self._process))
            await asyncio.sleep(_SAMPLE_S)


def _rss_mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
