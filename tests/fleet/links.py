"""Both ends of links over real sockets, and ends that are neither."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from serve_app.core.request import EngineRequest
from serve_app.core.results import RequestOutputs, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import RequestError
from serve_app.fleet.handshake import Handshake
from serve_app.fleet.link import IngressEnd, LinkServer
from serve_app.fleet.loss import ReplicaLostError
from serve_app.fleet.wire import WireDelta, WireItem, WireLoad, pack_request
from tests.fleet.replicas import until

LOAD: WireLoad = (1, 2, 3, 4, 5, 0.5)


def outputs(attempt_id: str, *offsets: int, ended: bool = False, error: RequestError | None = None) -> RequestOutputs:
    deltas = [TokenDelta(attempt_id, 0, offset, (offset + 5,)) for offset in offsets]
    return RequestOutputs(attempt_id, deltas, ended, error)


def item(offset: int) -> list[WireDelta]:
    """What comes of `outputs` with that offset."""
    return [(0, offset, (offset + 5,))]


class Replica:
    """Its link server, with engine and heartbeats by hand."""

    def __init__(self) -> None:
        self.alive = True
        self.server = LinkServer(self.submit, self.abort, lambda: LOAD if self.alive else None)
        self.address = ""
        self.requests: dict[str, EngineRequest] = {}
        self.running: set[str] = set()
        """Those that were not aborted."""
        self.failures: dict[str, Exception] = {}
        """What the attempts to come raise."""

    def submit(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.running.add(request.request_id)
        if (failure := self.failures.get(request.request_id)) is not None:
            raise failure

    def abort(self, request_id: str) -> None:
        self.running.remove(request_id)

    def say(self, attempt_id: str, *offsets: int, ended: bool = False) -> None:
        """Publish outputs of one attempt."""
        self.server.publish([outputs(attempt_id, *offsets, ended=ended)])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


class Ingress:
    """One link of an ingress to the replica, and what came by it."""

    def __init__(self, key: str) -> None:
        self.heard: list[WireLoad] = []
        self.items: dict[str, list[WireItem | ReplicaLostError]] = {}
        self.link = IngressEnd(key, self.heard.append)

    def received(self) -> dict[str, list[Any]]:
        """Of each attempt; deltas as lists, as they were sent."""
        return {name: [list(i) if isinstance(i, tuple) else i for i in items] for name, items in self.items.items()}

    async def connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: self.link, host, int(port))

    @staticmethod
    async def to(replica: Replica, key: str | None = None) -> "Ingress":
        ingress = Ingress(replica.server.key if key is None else key)
        await ingress.connect(replica.address)
        return ingress

    @staticmethod
    async def open(replica: Replica) -> "Ingress":
        ingress = await Ingress.to(replica)
        await until(lambda: bool(ingress.heard))
        return ingress

    async def start(self, replica: Replica, *attempt_ids: str) -> None:
        for attempt_id in attempt_ids:
            items = self.items[attempt_id] = []
            self.link.start(pack_request(EngineRequest("r", (5, 6), SamplingParams()), attempt_id), items.append)
        await until(lambda: replica.requests.keys() >= set(attempt_ids))


@asynccontextmanager
async def running() -> AsyncIterator[Replica]:
    replica = Replica()
    replica.address = await replica.server.listen("127.0.0.1")
    yield replica
    replica.server.close()
    await until(lambda: not replica.server.ends and not replica.server.attempts)


@asynccontextmanager
async def peer(
    say: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A replica that does `say` to whoever comes: its address."""
    writers = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await say(reader, writer)

    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for writer in writers:
        writer.close()
    server.close()


async def shake_hands(handshake: Handshake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(handshake.opening)
    while handshake.rest is None:
        writer.write(handshake.receive(await reader.readline()))
