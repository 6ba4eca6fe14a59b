"""The feed: one connection per ingress and replica, which carries the news of all requests between the two.

A streamed item costs Ray about 0.6 ms of processor time, whatever is in it, and takes 2 ms on its way beside a busy
engine; news of 16 requests would pay that 16 times. So each ingress keeps one plain TCP connection to each replica, and
all that the engine delivers at once comes as one frame: four bytes of length, then msgpack of the heartbeat and the
items. The call that runs a request still goes through Ray and decides how its attempt fares: it is what the router
places, what is cancelled, and what breaks when the replica dies.

Decides which way an attempt's items take: the feed when one is open as the attempt begins, its own call otherwise, and
never first one and then the other, since nothing keeps the order between them. Items that are lost with a feed end the
attempt; failover makes the next one.
"""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import suppress
from typing import cast

import msgpack

from serve_app.serving.attempt import ItemStream, LossReason, ReplicaLostError
from serve_app.serving.wire import HEARTBEAT_S, WireDelta, WireFeedItem, WireItem, WireLoad

FEED_ADDRESS = "feed"
"""In a replica's metadata: `host:port` of its feed port."""

_LENGTH_BYTES = 4
_HELLO = re.compile(rb"(?P<name>[0-9a-f]{32}) (?P<replica_id>\w+)\n", re.ASCII)
_LONGEST_HELLO = 128
_CONNECT_S = 5.0
_REST_S = 5.0
"""How long an attempt's last items may take by the feed after its call has ended."""
_SILENCE_S = 60
"""A machine that has answered nothing, or an ingress that has taken nothing, for so long is gone with its feed."""

Heartbeat = Callable[[], WireLoad | None]


class Outboxes:
    """At the replica: one for each ingress that has a feed open. For one event loop."""

    def __init__(self, replica_id: str, heartbeat: Heartbeat) -> None:
        """`heartbeat` gives None when the engine is dead; then feeds end, and new ones have nothing in them."""
        self._replica_id = replica_id
        self._heartbeat = heartbeat
        self._open: dict[str, Outbox] = {}

    def accept(self) -> "Outbox":
        """For a server's new connection: its protocol."""
        return Outbox(self._replica_id, self._heartbeat, self._open)

    def get(self, name: str) -> "Outbox | None":
        """Where the feed of this name takes its news, if it is open."""
        return self._open.get(name)


class Outbox(asyncio.Protocol):
    """At the replica: one ingress's connection, and the news that go with its next frame.

    The ingress says, in a line, its feed's name and which replica it takes this for; then it only listens. Heartbeats
    go with every frame, and alone when there has been none for `HEARTBEAT_S`.
    """

    def __init__(self, replica_id: str, heartbeat: Heartbeat, outboxes: MutableMapping[str, "Outbox"]) -> None:
        """`outboxes` has it under its feed's name while it is open."""
        self.is_open = False
        self._replica_id = replica_id
        self._heartbeat = heartbeat
        self._outboxes = outboxes
        self._hello = b""
        self._name = ""
        self._news: dict[str, list[WireDelta]] = {}
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        _notice_loss(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """The ingress's line. Whoever says anything else is hung up on."""
        self._hello += data
        if self.is_open or len(self._hello) > _LONGEST_HELLO:
            self._transport.abort()
        elif self._hello.endswith(b"\n"):
            self._open(_HELLO.fullmatch(self._hello))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody takes any more."""
        self.close()

    def put(self, attempt_id: str, deltas: list[WireDelta]) -> None:
        """Send them with what else comes in this turn of the event loop."""
        if not self._news and self.is_open:
            self._send_at(self._loop.call_soon(self._send))
        self._news.setdefault(attempt_id, []).extend(deltas)

    def close(self) -> None:
        """Hang up. What has not left yet does not."""
        self._transport.abort()
        if self._next is not None:
            self._next.cancel()
        if self.is_open:
            self.is_open = False
            del self._outboxes[self._name]

    def _open(self, hello: re.Match[bytes] | None) -> None:
        """A feed that its ingress opens anew ends the former one; a replica that has ended may have left its port."""
        if hello is None or hello["replica_id"].decode() != self._replica_id:
            self._transport.abort()
            return
        self._name = hello["name"].decode()
        if (former := self._outboxes.get(self._name)) is not None:
            former.close()
        self.is_open = True
        self._outboxes[self._name] = self
        self._send()

    def _send(self) -> None:
        if (load := self._heartbeat()) is None:
            self.close()
            return
        news, self._news = self._news, {}
        frame = msgpack.packb((load, list(news.items())))
        self._transport.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)
        self._send_at(self._loop.call_later(HEARTBEAT_S, self._send))

    def _send_at(self, handle: asyncio.Handle) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = handle


async def read_feed(address: str, name: str, replica_id: str) -> AsyncGenerator[WireFeedItem, None]:
    """At the ingress: what the replica at `address` sends by the feed of this name, until it hangs up.

    `name` is 32 hexadecimal digits that nobody can guess. Raises `OSError` when the connection cannot be made, or
    breaks.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        _notice_loss(writer.get_extra_info("socket"))
        writer.write(f"{name} {replica_id}\n".encode())
        with suppress(asyncio.IncompleteReadError):
            while True:
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
                yield msgpack.unpackb(await reader.readexactly(length), use_list=False)
    finally:
        writer.close()


def _notice_loss(connection: socket.socket) -> None:
    """Let the kernel end the connection when the other machine is gone, where it can: TCP alone would not notice."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = _SILENCE_S // 4
    for option, value in (("KEEPIDLE", quarter), ("KEEPINTVL", quarter), ("USER_TIMEOUT", _SILENCE_S * 1000)):
        if (number := getattr(socket, f"TCP_{option}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


class FedStream:
    """At the ingress: the items of one attempt, which come by the feed or by `call`. `streams` has it until cancelled.

    An attempt's reader leaves once it has everything. One that is still here after its call has ended is waiting for
    items that are on their way by the feed, or were lost with it.
    """

    def __init__(self, call: ItemStream, attempt_id: str, streams: MutableMapping[str, "FedStream"]) -> None:
        self._call = call
        self._attempt_id = attempt_id
        self._streams = streams
        self._items: asyncio.Queue[WireItem | Exception] = asyncio.Queue()
        self._following = asyncio.create_task(self._follow_call())
        streams[attempt_id] = self

    async def __anext__(self) -> WireItem:
        """The next item. Raises `ReplicaLostError`, `RequestError`."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def feed(self, item: WireItem) -> None:
        """Take an item that came by the feed."""
        self._items.put_nowait(item)

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""
        self._streams.pop(self._attempt_id, None)
        self._following.cancel()
        self._call.cancel()

    async def _follow_call(self) -> None:
        try:
            while True:
                self._items.put_nowait(await anext(self._call))
        except StopAsyncIteration:
            await asyncio.sleep(_REST_S)
            self._items.put_nowait(ReplicaLostError(LossReason.CUT))
        except Exception as error:
            self._items.put_nowait(error)
