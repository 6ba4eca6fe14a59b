"""The cost of a replica without its model: tasks, frames and CPU time per token of a stub engine.

    python -m load_tests.bench.stub_engine --json FILE

The replica is a separate process. The engine's thread, the event loop and the link are real; the
engine's core has no model and gives each request one token per step. This process is the ingress's
end of the link, over a real socket, and only counts. A step takes a fixed time, whatever the number
of streams.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any

import orjson
import typer
import uvloop

from serve_app.cli.outputs import JsonFile
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import SchedulerStats
from serve_app.engine.async_engine import AsyncEngine
from serve_app.engine.core import EngineConfig
from serve_app.fleet.link import IngressEnd, LinkServer
from serve_app.fleet.loss import ReplicaLostError
from serve_app.fleet.wire import WireItem, WireLoad, pack_load, pack_request

STREAMS = (1, 16, 64, 256)
_STREAM_INTERVAL_S = 0.05
_WARM_UP_S = 0.5
_ENDLESS = 10**6
_WAIT_S = 60.0


class StubCore:
    """Replaces `EngineCore`: a step sleeps, then gives every request its next token."""

    def __init__(self, step_s: float) -> None:
        self.config = EngineConfig(max_num_seqs=max(STREAMS))
        self.clock: Callable[[], float] = time.monotonic
        self.info = None
        self._step_s = step_s
        self._lengths: dict[str, int] = {}
        self._most: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        """Like `EngineCore`, as are the methods below."""
        return bool(self._lengths)

    def prepare(self, request: EngineRequest) -> None:
        """Do nothing: there is nothing to prepare."""

    def check_invariants(self) -> None:
        """Do nothing: there are none."""

    def add(self, request: EngineRequest) -> None:
        """Add a request, which gets a token in the next step."""
        self._lengths[request.request_id] = 0
        self._most[request.request_id] = request.params.max_tokens or _ENDLESS

    def abort(self, request_id: str) -> None:
        """Remove a request."""
        self._lengths.pop(request_id, None)
        self._most.pop(request_id, None)

    def stats(self) -> SchedulerStats:
        """Return stats in which all requests run and use no blocks."""
        return SchedulerStats(0, len(self._lengths), 4096, 0, 0)

    def step(self, on_scheduled: Callable[[], None]) -> list[TokenDelta]:
        """Return one token for each request."""
        on_scheduled()
        time.sleep(self._step_s)
        return [self._next(request_id, offset) for request_id, offset in list(self._lengths.items())]

    def _next(self, request_id: str, offset: int) -> TokenDelta:
        self._lengths[request_id] = offset + 1
        reason = None
        if offset + 1 == self._most[request_id]:
            reason = FinishReason.LENGTH
            self.abort(request_id)
        return TokenDelta(request_id, 0, offset, (1000 + offset % 40_000,), reason, None if offset else 0)


async def open_replica(step_s: float) -> LinkServer:
    """Return a replica on this event loop; `listen` opens its port."""
    engine = AsyncEngine(lambda: StubCore(step_s), stream_interval_s=_STREAM_INTERVAL_S)  # type: ignore[arg-type, return-value]
    links = LinkServer(engine.submit, engine.abort, lambda: pack_load(engine.stats(), 1, None))
    await engine.start(links.publish)
    return links


def replica(pipe: Connection, step_s: float) -> None:
    """Run the replica's process: send its link's address, then its resource usage on each
    request."""

    async def run() -> None:
        links = await open_replica(step_s)
        pipe.send((await links.listen("127.0.0.1"), links.key))
        over = asyncio.Event()

        def answer() -> None:
            try:
                pipe.recv()
                pipe.send((time.process_time(), len(asyncio.all_tasks())))
            except EOFError:
                over.set()

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await over.wait()
        links.close()

    uvloop.run(run())


@dataclass
class Cost:
    """The cost of a number of streams."""

    streams: int
    tasks: int
    """Number of asyncio tasks, including those of the process itself."""
    microseconds_per_token: float
    tokens_per_s: float
    frames_per_s: float


class Ingress:
    """The other end of the link, which counts tokens."""

    def __init__(self, key: str) -> None:
        self.link = IngressEnd(key, self._heard)
        self.open = asyncio.Event()
        self.frames = self.tokens = 0

    def _heard(self, load: WireLoad) -> None:
        self.frames += 1
        self.open.set()

    def take(self, item: WireItem | ReplicaLostError) -> None:
        """Count the item's tokens. Raises an error for items that this replica must not send."""
        if not isinstance(item, list | tuple):
            raise TypeError(f"no deltas: {item!r}")
        self.tokens += sum(len(delta[2]) for delta in item)


async def measure(ingress: Ingress, pipe: Connection, streams: int, seconds: float) -> Cost:
    """Keep `streams` streams running for `seconds` and return their cost."""

    def used() -> tuple[float, int]:
        pipe.send(None)
        cpu_s, tasks = pipe.recv()
        return cpu_s, tasks

    params = SamplingParams(max_tokens=_ENDLESS)
    names = [f"{streams}-{number}.1" for number in range(streams)]
    for name in names:
        ingress.link.start(pack_request(EngineRequest(name, (5, 6), params), name), ingress.take)
    await asyncio.sleep(_WARM_UP_S)
    cpu_s, _ = used()
    frames, tokens, started_at = ingress.frames, ingress.tokens, time.monotonic()
    await asyncio.sleep(seconds)
    after_s, tasks = used()
    took_s, num_tokens = time.monotonic() - started_at, ingress.tokens - tokens
    for name in names:
        ingress.link.cancel(name)
    return Cost(
        streams=streams,
        tasks=tasks,
        microseconds_per_token=round(1e6 * (after_s - cpu_s) / num_tokens, 2),
        tokens_per_s=round(num_tokens / took_s),
        frames_per_s=round((ingress.frames - frames) / took_s, 1),
    )


async def experiment(step_s: float, seconds: float) -> list[Cost]:
    """Return the figures of one run."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=replica, args=(theirs, step_s), daemon=True)
    process.start()
    theirs.close()
    address, key = await asyncio.to_thread(ours.recv)
    host, _, port = address.rpartition(":")
    ingress = Ingress(key)
    await asyncio.get_running_loop().create_connection(lambda: ingress.link, host, int(port))
    async with asyncio.timeout(_WAIT_S):
        await ingress.open.wait()
    costs = [await measure(ingress, ours, streams, seconds) for streams in STREAMS]
    ingress.link.close()
    ours.close()
    await asyncio.to_thread(process.join, _WAIT_S)
    return costs


def main(
    json_file: JsonFile = None,
    step_ms: Annotated[float, typer.Option(min=1, help="How long a step takes.")] = 25.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each number of streams is measured.")] = 4.0,
) -> None:
    """Run once and print the figures."""
    costs: list[dict[str, Any]] = [asdict(cost) for cost in uvloop.run(experiment(step_ms / 1000, seconds))]
    for cost in costs:
        typer.echo("  ".join(f"{name} {value}" for name, value in cost.items()))
    if json_file is not None:
        json_file.write_bytes(orjson.dumps({"step_ms": step_ms, "costs": costs}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    typer.run(main)
