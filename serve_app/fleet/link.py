"""The link: one TCP connection per ingress and replica. Requests go one way, the outputs of all of them the other.

A call through a Ray handle takes 2 ms on its way beside a busy engine and more than a millisecond of the ingress's
processor time; each item that it streams back costs 0.6 ms more. Here a request is one message, and all that the engine
flushes at once is another. Ray starts the replicas, watches them, and tells the ingress where their links are.

It begins with a `handshake`; ends that do not understand or believe each other hang up, and say so once. Then the
ingress sends, in msgpack, requests (dicts) and the ids of attempts that it no longer wants (strings). The replica sends
frames of a heartbeat and the items of all attempts since the last frame; an item of None ends its attempt, and the
reason why the replica hangs up takes the place of the last heartbeat. A link that ends takes its attempts with it: the
replica aborts them, and failover makes the next ones.
"""

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

import msgpack

from serve_app.errors import EngineError, RequestError
from serve_app.fleet.handshake import Handshake, HandshakeError
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.wire import HEARTBEAT_S, WireDelta, WireItem, WireLoad, WireRequest

logger = logging.getLogger(__name__)

LINK = "link"
"""In a replica's metadata: its link's `host:port`, and the key that opens it."""

_KEY_BYTES = 16
_HANDSHAKE_S = 5.0
MAX_STRANGERS = 64
"""Connections whose handshake has not ended; one more ends the oldest."""
_BETWEEN_COMPLAINTS_S = 5.0
_SILENCE_S = 60
"""A connection whose peer acknowledges nothing for this long is closed."""
MAX_UNSENT_BYTES = 64 * 2**20
"""A replica closes the link of an ingress that has so much to read: its requests go on over the next one."""

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException)
"""What reading something raises that no end of this version sends."""

Generate = Callable[[WireRequest], AsyncGenerator[list[WireDelta], None]]
Heartbeat = Callable[[], WireLoad | None]
OnHeartbeat = Callable[[WireLoad], None]
OnItem = Callable[[WireItem | ReplicaLostError], None]


class LinkServer:
    """At the replica: takes the links of all ingresses. For one event loop."""

    def __init__(self, generate: Generate, heartbeat: Heartbeat) -> None:
        """`heartbeat` gives None when the engine is dead; then links end."""
        self.generate = generate
        self.heartbeat = heartbeat
        self.key = secrets.token_hex(_KEY_BYTES)
        self.ends: set[ReplicaEnd] = set()
        """Those that are open."""
        self.ended = asyncio.Event()
        """Set whenever a link has ended."""
        self._strangers: dict[ReplicaEnd, None] = {}
        """Those that have proven nothing yet, the oldest first."""
        self._complained_at = -math.inf
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> str:
        """Open a port; returns its `host:port`."""
        self._server = await asyncio.get_running_loop().create_server(lambda: ReplicaEnd(self), host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def attempts(self) -> "list[asyncio.Task[None]]":
        """Those that are running, of all ingresses."""
        return [task for end in self.ends for task in end.attempts.values()]

    def unsent_bytes(self) -> int:
        """What the slowest ingress has yet to take."""
        return max((end.unsent_bytes for end in list(self.ends)), default=0)

    async def drained(self) -> None:
        """Return once every ingress has hung up: it does when this replica is leaving and has nothing of it to do."""
        while self.ends:
            self.ended.clear()
            await self.ended.wait()

    def close(self) -> None:
        """Close all links: this replica is leaving."""
        if self._server is not None:
            self._server.close()
        for end in (*self.ends, *self._strangers):
            end.close(LossReason.LEFT)

    def connected(self, end: "ReplicaEnd") -> None:
        """Somebody has, who may be anybody.

        Not the newest is turned away when there are too many: who hoards connections would keep the ingress out.
        """
        self._strangers[end] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
            self.complain(f"more than {MAX_STRANGERS} connections have not proven who they are: the oldest are closed")

    def opened(self, end: "ReplicaEnd") -> None:
        """It is an ingress."""
        self._strangers.pop(end, None)
        self.ends.add(end)

    def lost(self, end: "ReplicaEnd") -> None:
        """Its connection has ended."""
        self._strangers.pop(end, None)
        self.ends.discard(end)
        self.ended.set()

    def complain(self, text: str) -> None:
        """Log what strangers do, but not as often as they do it."""
        now = time.monotonic()
        if now - self._complained_at >= _BETWEEN_COMPLAINTS_S:
            self._complained_at = now
            logger.error("%s", text)


class ReplicaEnd(asyncio.Protocol):
    """At the replica: the link of one ingress. A connection without a handshake is closed.

    Heartbeats go with every frame, and alone when there has been none for `HEARTBEAT_S`.
    """

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._is_open = False
        self._handshake = Handshake.of_replica(server.key)
        self._unpacker = msgpack.Unpacker(use_list=False)
        self._packer = msgpack.Packer()
        self.attempts: dict[str, asyncio.Task[None]] = {}
        """The tasks that run attempts, by the attempts' ids."""
        self._outputs: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        self._next: asyncio.Handle = self._loop.call_later(_HANDSHAKE_S, self.abort)
        _notice_loss(transport.get_extra_info("socket"))
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`."""
        if self._transport.is_closing():
            return
        if not self._is_open:
            data = self._shake_hands(data)
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                self._receive(message)
        except _MALFORMED as error:
            logger.error("an ingress sent what is no message of the link (%r): hung up", error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`. Nobody reads its attempts any more."""
        self._is_open = False
        self._next.cancel()
        self._server.lost(self)
        for task in self.attempts.values():
            task.cancel()

    def close(self, reason: LossReason) -> None:
        """Send what is left and the reason, then close."""
        self._next.cancel()
        if self._is_open:
            self._is_open = False
            self._write(reason)
        self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is left to send."""
        self._transport.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """What comes after the handshake; nothing before its end."""
        try:
            self._transport.write(self._handshake.receive(data))
        except HandshakeError as error:
            self._server.complain(f"what has connected from {_peer(self._transport)} {error}: hung up")
            self._transport.write(error.answer)
            self._transport.close()
        if (rest := self._handshake.rest) is None:
            return b""
        self._is_open = True
        self._server.opened(self)
        self._send()
        return rest

    def _receive(self, message: Any) -> None:
        """Raises `TypeError`, `KeyError` for a malformed message."""
        if isinstance(message, str):
            if (task := self.attempts.get(message)) is not None:
                task.cancel()
        else:
            self._start(message)

    def _start(self, request: WireRequest) -> None:
        attempt_id = request["attempt_id"]
        self.attempts[attempt_id] = task = asyncio.create_task(self._run(request), name=f"attempt {attempt_id}")
        task.add_done_callback(lambda _: self.attempts.pop(attempt_id, None))

    async def _run(self, request: WireRequest) -> None:
        attempt_id = request["attempt_id"]
        try:
            async with aclosing(self._server.generate(request)) as items:
                async for item in items:
                    self._put(attempt_id, item)
        except RequestError as error:
            self._put(attempt_id, error.to_wire())
        except Exception:
            logger.exception("attempt %s failed", attempt_id)
            self._put(attempt_id, EngineError("the engine failed the request").to_wire())
        self._put(attempt_id, None)

    def _put(self, attempt_id: str, item: WireItem | None) -> None:
        """Send it, together with whatever else this turn of the event loop produces."""
        if not self._outputs and self._is_open:
            self._send_at(self._loop.call_soon(self._send))
        self._outputs.append(self._packer.pack((attempt_id, item)))

    def _send(self) -> None:
        self._send_at(self._loop.call_later(HEARTBEAT_S, self._send))
        if (load := self._server.heartbeat()) is None:
            self.close(LossReason.ENGINE_DIED)
        else:
            self._write(load)

    def _write(self, heartbeat: WireLoad | LossReason) -> None:
        outputs, self._outputs = self._outputs, []
        self._transport.write(b"".join((self._head(heartbeat), self._packer.pack_array_header(len(outputs)), *outputs)))
        if self.unsent_bytes > MAX_UNSENT_BYTES:
            logger.warning("an ingress has not read for too long; its link is closed")
            self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        """What the ingress has not taken, nor its kernel."""
        return self._transport.get_write_buffer_size()

    def _head(self, heartbeat: WireLoad | LossReason) -> bytes:
        """A method of its own, so that a profile shows what heartbeats cost apart from tokens."""
        head: bytes = self._packer.pack_array_header(2) + self._packer.pack(heartbeat)
        return head

    def _send_at(self, handle: asyncio.Handle) -> None:
        self._next.cancel()
        self._next = handle


class IngressEnd(asyncio.Protocol):
    """At the ingress: the link to one replica. It is open once its first heartbeat has come.

    A replica that speaks another version, or does not know the key, is lost as `INCOMPATIBLE`.
    """

    def __init__(self, key: str, on_heartbeat: OnHeartbeat) -> None:
        self.lost: asyncio.Future[LossReason] = asyncio.get_running_loop().create_future()
        """Done when the link is."""
        self._handshake = Handshake.of_ingress(key)
        self._transport: asyncio.Transport | None = None
        self._on_heartbeat = on_heartbeat
        self._unpacker = msgpack.Unpacker(use_list=False)
        self._attempts: dict[str, OnItem] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        _notice_loss(transport.get_extra_info("socket"))
        self._write(self._handshake.opening)

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`."""
        if self._handshake.rest is None:
            data = self._shake_hands(data)
        try:
            self._unpacker.feed(data)
            for load, outputs in self._unpacker:
                for attempt_id, item in outputs:
                    self._take(attempt_id, item)
                if isinstance(load, str):
                    self._end(LossReason(load))
                else:
                    self._on_heartbeat(load)
        except _MALFORMED as error:
            logger.error(
                "the replica at %s sent what is no frame of the link (%r): hung up", _peer(self._transport), error
            )
            self._hang_up(LossReason.UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        self._end(LossReason.UNAVAILABLE)

    def start(self, request: WireRequest, on_item: OnItem) -> None:
        """Run an attempt over the open link; `on_item` gets its items, and a `ReplicaLostError` last."""
        if self.lost.done():
            on_item(ReplicaLostError(LossReason.REFUSED))
            return
        message = msgpack.packb(request)
        self._attempts[request["attempt_id"]] = on_item
        self._write(message)

    def cancel(self, attempt_id: str) -> None:
        """Have the replica abort this attempt."""
        if self._attempts.pop(attempt_id, None) is not None:
            self._write(msgpack.packb(attempt_id))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """What comes after the handshake; nothing before its end."""
        try:
            self._write(self._handshake.receive(data))
        except HandshakeError as error:
            logger.error("the replica at %s %s: it gets no requests", _peer(self._transport), error)
            self._hang_up(LossReason.INCOMPATIBLE)
        return self._handshake.rest or b""

    def _hang_up(self, reason: LossReason) -> None:
        self._end(reason)
        self.close()

    def _write(self, message: bytes) -> None:
        if self._transport is not None:
            self._transport.write(message)

    def _take(self, attempt_id: str, item: WireItem | None) -> None:
        if item is not None:
            if (on_item := self._attempts.get(attempt_id)) is not None:
                on_item(item)
        elif (on_item := self._attempts.pop(attempt_id, None)) is not None:
            # A reader that has every finish reason reads no further, so only an incomplete stream gets this error.
            on_item(ReplicaLostError(LossReason.CUT))

    def _end(self, reason: LossReason) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        attempts, self._attempts = self._attempts, {}
        for on_item in attempts.values():
            on_item(ReplicaLostError(reason))


def _peer(transport: asyncio.Transport | None) -> str:
    address = None if transport is None else transport.get_extra_info("peername")
    return "an unknown address" if address is None else f"{address[0]}:{address[1]}"


def _notice_loss(connection: socket.socket) -> None:
    """Let the kernel close the connection when the peer machine is gone, where it can: TCP alone would not notice."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = _SILENCE_S // 4
    for option, value in (("KEEPIDLE", quarter), ("KEEPINTVL", quarter), ("USER_TIMEOUT", _SILENCE_S * 1000)):
        if (number := getattr(socket, f"TCP_{option}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
