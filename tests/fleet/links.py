"""Both ends of links over real sockets, and ends that are neither."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet.handshake import Handshake
from serve_app.fleet.link import IngressEnd, LinkServer
from serve_app.fleet.loss import ReplicaLostError
from serve_app.fleet.wire import WireDelta, WireItem, WireLoad, WireRequest, pack_request
from tests.fleet.replicas import until

LOAD: WireLoad = (1, 2, 3, 4, 5, 0.5)


def item(offset: int) -> list[WireDelta]:
    return [(0, offset, (offset + 5,))]


class Replica:
    """Its link server, with engine and heartbeats by hand."""

    def __init__(self) -> None:
        self.alive = True
        self.server = LinkServer(self.generate, lambda: LOAD if self.alive else None)
        self.address = ""
        self.requests: dict[str, WireRequest] = {}
        self.says: dict[str, asyncio.Queue[Any]] = {}
        """What each attempt yields, or raises; None ends it."""

    async def generate(self, data: WireRequest) -> AsyncGenerator[list[WireDelta], None]:
        attempt_id = data["attempt_id"]
        self.requests[attempt_id] = data
        said = self.says[attempt_id] = asyncio.Queue()
        try:
            while (what := await said.get()) is not None:
                if isinstance(what, Exception):
                    raise what
                yield what
        finally:
            del self.says[attempt_id]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


class Ingress:
    """One link of an ingress to the replica, and what came by it."""

    def __init__(self, key: str) -> None:
        self.heard: list[WireLoad] = []
        self.items: dict[str, list[WireItem | ReplicaLostError]] = {}
        self.link = IngressEnd(key, self.heard.append)

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

    async def start(self, replica: Replica, attempt_id: str) -> "asyncio.Queue[Any]":
        items = self.items[attempt_id] = []

        def take(item: WireItem | ReplicaLostError) -> None:
            items.append(list(item) if isinstance(item, tuple) else item)

        self.link.start(pack_request(EngineRequest("r", (5, 6), SamplingParams()), attempt_id), take)
        await until(lambda: attempt_id in replica.says)
        return replica.says[attempt_id]


@asynccontextmanager
async def running() -> AsyncIterator[Replica]:
    replica = Replica()
    replica.address = await replica.server.listen("127.0.0.1")
    yield replica
    replica.server.close()
    await until(lambda: not replica.server.ends and not replica.server.attempts())


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
