"""Measures what two unrelated deaths of replicas cost all requests.

Everything from the links to failover is real; the engines are stubs.

    python -m load_tests.chaos.two_deaths --json FILE

8 replicas of 32 slots, 200 streams of 20 to 79 tokens, all in this process. Two replicas die 2.5 s
apart and are replaced 15 s later; until then there are 192 slots. Reports the number of running
sequences, the silence of streams, and the interrupted ones.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import orjson
import typer

from serve_app.cli.outputs import JsonFile
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, RequestOutputs, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import OverloadedError
from serve_app.fleet.failover import Failover
from serve_app.fleet.link import LINK, LinkServer
from serve_app.fleet.loss import LossReason
from serve_app.fleet.prefix_routing import PrefixRouting
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.transport import LinkTransport
from serve_app.fleet.watchdog import Watchdog
from serve_app.fleet.wire import WireLoad

SLOTS = 32
_MAX_IN_ENGINE = 4 * SLOTS
_REPLICAS, _STREAMS, _STEP_S = 8, 200, 0.25
_BETWEEN_DEATHS_S, _REPLACED_AFTER_S, _SAMPLE_S = 2.5, 15.0, 0.05
_INFO = {"block_size": 16, "num_blocks": 4096}


class StubEngine:
    """Emits one token per step for each request in one of `SLOTS` slots. Others wait in order."""

    def __init__(self, step_s: float) -> None:
        self.running = 0
        self.waiting = 0
        self.link = LinkServer(self._submit, self._abort, self._load)
        self._step_s = step_s
        self._slots = asyncio.Semaphore(SLOTS)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def _submit(self, request: EngineRequest) -> None:
        if self.running + self.waiting >= _MAX_IN_ENGINE:
            raise OverloadedError("full")
        self._tasks[request.request_id] = asyncio.create_task(self._run(request))

    def _abort(self, request_id: str) -> None:
        self._tasks.pop(request_id).cancel()

    async def _run(self, request: EngineRequest) -> None:
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            await self._decode(request)
        finally:
            self.running -= 1
            self._slots.release()

    async def _decode(self, request: EngineRequest) -> None:
        assert request.params.max_tokens is not None
        known = len(request.prior_output_ids[0]) if request.prior_output_ids else 0
        for offset in range(known, request.params.max_tokens):
            await asyncio.sleep(self._step_s)
            ended = offset == request.params.max_tokens - 1
            reason = FinishReason.LENGTH if ended else None
            delta = TokenDelta(request.request_id, 0, offset, (offset,), reason, 0 if offset == known else None)
            self.link.publish([RequestOutputs(request.request_id, [delta], ended)])

    def _load(self) -> WireLoad:
        return self.running, self.waiting, 4096, 4096, 1, 0.0


@dataclass
class Stream:
    """What the reader of one stream received."""

    token_ids: list[int] = field(default_factory=list)
    visited: list[str] = field(default_factory=list)
    longest_silence_s: float = 0.0
    last_at: float = 0.0


class StubFleet:
    """Stub engines behind real links, and our real code up to failover.

    Use it on one event loop.
    """

    def __init__(self, step_s: float) -> None:
        self.engines: dict[str, StubEngine] = {}
        self.losses: Counter[LossReason] = Counter()
        self.replicas = ReplicaSet()
        self._step_s = step_s
        self._metadata: dict[str, dict[str, Any]] = {}
        self._killed: list[StubEngine] = []
        transport = LinkTransport(self.replicas, PrefixRouting())
        self._failover = Failover(
            transport, self.replicas, wait_s=30.0, on_failover=lambda reason, _: self.losses.update([reason])
        )
        self.watchdog = Watchdog(transport, self.replicas)

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return sum(engine.running for engine in self.engines.values())

    @property
    def waiting(self) -> int:
        """Sequences that wait in an engine."""
        return sum(engine.waiting for engine in self.engines.values())

    async def add(self, name: str) -> None:
        """Start a replica."""
        engine = self.engines[name] = StubEngine(self._step_s)
        address = await engine.link.listen("127.0.0.1")
        link = (address, engine.link.key)
        self._metadata[name] = {"info": _INFO, "max_num_seqs": SLOTS, "prefix_cache": True, LINK: link}
        self.replicas.publish(self._metadata)

    def kill(self, name: str) -> None:
        """Close its links and port, as the kernel does for a process that dies."""
        engine = self.engines.pop(name)
        self._killed.append(engine)
        for end in list(engine.link.ends):
            end._transport.abort()
        engine.link.close()

    def replace(self, name: str) -> None:
        """Remove the replica, as Ray's controller does once it has detected the death."""
        del self._metadata[name]
        self.replicas.publish(self._metadata)

    async def read(self, number: int, max_tokens: int, stream: Stream) -> None:
        """Read one stream to its end."""
        params = SamplingParams(max_tokens=max_tokens, seed=1)
        prompt = tuple(range(number, number + 40))
        stream.last_at = time.monotonic()
        async with aclosing(
            self._failover.generate(EngineRequest(f"r{number}", prompt, params), deadline=1e9, visited=stream.visited)
        ) as outputs:
            async for deltas in outputs:
                now = time.monotonic()
                stream.longest_silence_s = max(stream.longest_silence_s, now - stream.last_at)
                stream.last_at = now
                for delta in deltas:
                    stream.token_ids += delta.token_ids

    def close(self) -> None:
        """End all links."""
        for engine in self.engines.values():
            engine.link.close()


@asynccontextmanager
async def open_fleet(num_replicas: int, step_s: float) -> AsyncIterator[StubFleet]:
    """Open a fleet of `num_replicas` replicas ("0" and so on) with a watchdog."""
    fleet = StubFleet(step_s)
    for number in range(num_replicas):
        await fleet.add(str(number))
    watching = asyncio.create_task(fleet.watchdog.run())
    try:
        yield fleet
    finally:
        fleet.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def experiment() -> dict[str, Any]:
    """Return the figures of one run."""
    streams = [Stream() for _ in range(_STREAMS)]
    lengths = [20 + 7 * number % 60 for number in range(_STREAMS)]
    async with open_fleet(_REPLICAS, _STEP_S) as fleet:
        reading = [asyncio.create_task(fleet.read(i, lengths[i], stream)) for i, stream in enumerate(streams)]
        started_at = time.monotonic()
        while not all(stream.token_ids for stream in streams):  # noqa: ASYNC110 - no event to await
            await asyncio.sleep(_SAMPLE_S)
        for stream in streams:
            stream.longest_silence_s = 0.0
        strikes = [asyncio.create_task(_strike(fleet, str(number))) for number in range(2)]
        shares = []
        while not all(task.done() for task in strikes):
            await asyncio.sleep(_SAMPLE_S)
            left = sum(not task.done() for task in reading)
            slots = SLOTS * len(fleet.engines)
            shares.append(fleet.running / min(left, slots) if left else 1.0)
        await asyncio.gather(*reading, *strikes)
        seconds = time.monotonic() - started_at
    on_dead = sum(bool({"0", "1"} & set(stream.visited)) for stream in streams)
    silences = sorted(stream.longest_silence_s for stream in streams)
    return {
        "whole": sum(stream.token_ids == list(range(length)) for stream, length in zip(streams, lengths, strict=True)),
        "least_share_of_possible_running": round(min(shares), 3),
        "samples_below_nine_tenths": sum(share < 0.9 for share in shares),
        "silence_median_s": round(median(silences), 2),
        "silence_longest_s": round(silences[-1], 2),
        "were_on_a_dead_replica": on_dead,
        "interrupted": sum(len(stream.visited) > 1 for stream in streams),
        "losses": {str(reason): count for reason, count in fleet.losses.items()},
        "seconds": round(seconds, 1),
    }


async def _strike(fleet: StubFleet, name: str) -> None:
    await asyncio.sleep(int(name) * _BETWEEN_DEATHS_S)
    fleet.kill(name)
    await asyncio.sleep(_REPLACED_AFTER_S)
    fleet.replace(name)
    await fleet.add(f"{name} again")


def main(json_file: JsonFile = None) -> None:
    """Run it once and print the figures."""
    figures = orjson.dumps(asyncio.run(experiment()), option=orjson.OPT_INDENT_2)
    typer.echo(figures.decode())
    if json_file is not None:
        json_file.write_bytes(figures)


if __name__ == "__main__":
    typer.run(main)
