"""10,000 requests whose clients disconnect at once: effects on health checks and other clients.

The crowd is a separate process (`python -m load_tests.chaos.hang_ups PORT COUNT`), so that it does
not slow down the measured clients.
"""

import asyncio
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp

from load_tests.chaos.experiment import Experiment
from load_tests.chaos.traffic import Answer, ask, open_session, send_into
from serve_app.workloads.figures import percentile

_REQUESTS, _AT_ONCE = 10_000, 60
_PROBES = 100
_PROBE_PAUSE_S = 0.1
_PROBE_P99_S, _PROBE_MOST_S, _FIRST_TOKEN_P95_S = 0.5, 1.0, 2.0
_BODY = b'{"prompt": "x", "max_tokens": 1}'
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


async def hang_up(experiment: Experiment) -> None:
    """Check that health is answered within 0.5 s, and another tenant's first token comes within 2
    s."""
    port = experiment.fleet.url.rpartition(":")[2]
    command = (sys.executable, "-m", "load_tests.chaos.hang_ups", port, str(_REQUESTS))
    crowd = await asyncio.create_subprocess_exec(*command)
    ended = asyncio.create_task(crowd.wait())
    started = time.monotonic()
    experiment.struck()
    client = asyncio.create_task(_first_tokens(experiment, ended))
    async with open_session() as session:
        probes = await _probe(session, f"{experiment.fleet.url}/health/ready", ended)
    first_tokens_s, notes, problems = await client, experiment.row.notes, experiment.row.problems
    notes["crowd_s"] = round(time.monotonic() - started, 1)
    waits_s = [waited for _, waited in probes]
    notes["probes"] = dict(Counter(status for status, _ in probes))
    notes["probe_p99_s"], notes["probe_most_s"] = _percentile(waits_s, 99), _percentile(waits_s, 100)
    notes["first_tokens"], notes["first_token_p95_s"] = len(first_tokens_s), _percentile(first_tokens_s, 95)
    if ended.result() != 0:
        problems.append("the crowd failed")
    if notes["probes"].keys() != {200}:
        problems.append(f"health said {notes['probes']}")
    limits = (("probe_p99_s", _PROBE_P99_S), ("probe_most_s", _PROBE_MOST_S), ("first_token_p95_s", _FIRST_TOKEN_P95_S))
    problems.extend(f"{name} is {notes[name]}, more than {limit:g}" for name, limit in limits if notes[name] > limit)


async def _probe(session: aiohttp.ClientSession, url: str, ended: "asyncio.Task[int]") -> list[tuple[int, float]]:
    """Return (status, seconds) of at least 100 probes, sent at fixed times until the crowd has
    ended."""
    probes: list[asyncio.Task[tuple[int, float]]] = []

    async def probe() -> tuple[int, float]:
        start = time.monotonic()
        async with session.get(url) as answer:
            await answer.read()
        return answer.status, time.monotonic() - start

    while len(probes) < _PROBES or not ended.done():
        probes.append(asyncio.create_task(probe()))
        await asyncio.sleep(_PROBE_PAUSE_S)
    return await asyncio.gather(*probes)


async def _first_tokens(experiment: Experiment, ended: "asyncio.Task[int]") -> list[float]:
    """Return the TTFT in seconds of short requests, one after another, while the crowd runs."""
    waits_s: list[float] = []
    while not ended.done():
        answer = Answer(ask("of another line", "Is there a free slot?", 4, user="another"))
        experiment.answers.append(answer)
        await send_into(answer, experiment.session, experiment.fleet.url)
        waits_s.append(answer.wait_s())
        await asyncio.sleep(_PROBE_PAUSE_S)
    return waits_s


def _percentile(seconds: Sequence[float], percent: float) -> float:
    return round(percentile(seconds, percent) or 0.0, 3)


async def _crowd(port: int, count: int) -> None:
    loop, left = asyncio.get_running_loop(), count

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            with socket.socket() as connection:
                connection.setblocking(False)
                # a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                try:
                    await loop.sock_connect(connection, ("127.0.0.1", port))
                    await loop.sock_sendall(connection, _REQUEST)
                except ConnectionError:
                    await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(_crowd(int(sys.argv[1]), int(sys.argv[2])))
