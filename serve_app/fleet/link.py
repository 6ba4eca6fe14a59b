"""The link: one TCP connection per ingress and replica, for requests and all their outputs.

A call through a Ray handle takes 2 ms while the engine is busy, and over 1 ms of the ingress's CPU
time. Each streamed item costs 0.6 ms more. On a link, a request is one message, and everything that
the engine flushes at once is one message. Ray starts and monitors the replicas, and gives the
ingress their links' addresses.

After the `handshake`, messages are in msgpack. Ends that do not understand or trust each other
disconnect, and log this once. The ingress sends requests (dicts) and the ids of attempts to abort
(strings). The replica sends frames: a heartbeat, and the items of all attempts since the last
frame. An item of None ends its attempt. In the last frame, the reason for closing replaces the
heartbeat. When a link ends, the replica aborts its attempts, and failover starts new ones.
"""

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import cast

import msgpack

from serve_app.core.request import EngineRequest
from serve_app.core.results import RequestOutputs
from serve_app.errors import EngineError, RequestError
from serve_app.fleet.handshake import Handshake, HandshakeError
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.wire import HEARTBEAT_S, WireItem, WireLoad, WireRequest, pack_outputs, unpack_request

logger = logging.getLogger(__name__)

LINK = "link"
"""Key in a replica's metadata: its link's `host:port` and key."""

_KEY_BYTES = 16
_HANDSHAKE_S = 5.0
MAX_UNAUTHENTICATED = 64
"""Maximum number of connections whose handshake has not finished; one more closes the oldest."""
_PEER_ERRORS_EVERY_S = 5.0
_SILENCE_S = 60
"""A connection whose peer acknowledges nothing for this long is closed."""
MAX_UNSENT_BYTES = 64 * 2**20
"""A replica closes the link of an ingress that has this much unread.

The requests continue over the next link.
"""

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException)
"""Errors raised while an invalid message is read."""

Submit = Callable[[EngineRequest], None]
Abort = Callable[[str], None]
Heartbeat = Callable[[], WireLoad | None]
OnHeartbeat = Callable[[WireLoad], None]
OnItem = Callable[[WireItem | ReplicaLostError], None]


class LinkServer:
    """The replica's side: accepts the links of all ingresses. Not thread-safe."""

    def __init__(self, submit: Submit, abort: Abort, heartbeat: Heartbeat) -> None:
        """`submit` and `abort`: the engine's. Request ids are attempt ids.

        Pass outputs to `publish`. `heartbeat`: returns None if the engine is dead; then links end.
        """
        self.heartbeat = heartbeat
        self.key = secrets.token_hex(_KEY_BYTES)
        self.ends: set[ReplicaEnd] = set()
        """Open links."""
        self.attempts: dict[str, ReplicaEnd] = {}
        """The link of each running attempt, by id."""
        self.ended = asyncio.Event()
        """Set whenever a link has ended."""
        self._unauthenticated: dict[ReplicaEnd, None] = {}
        """Connections whose handshake has not finished, the oldest first."""
        self._submit = submit
        self._abort = abort
        self._logged_at = -math.inf
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> str:
        """Open a port and return its `host:port`."""
        self._server = await asyncio.get_running_loop().create_server(lambda: ReplicaEnd(self), host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def publish(self, batch: list[RequestOutputs]) -> None:
        """Send each ingress the outputs of its attempts in one frame.

        Drops those of aborted attempts.
        """
        frames: dict[ReplicaEnd, list[RequestOutputs]] = {}
        for outputs in batch:
            if (end := self.attempts.get(outputs.request_id)) is not None:
                frames.setdefault(end, []).append(outputs)
                if outputs.ended:
                    del self.attempts[outputs.request_id]
        for end, frame in frames.items():
            end.send(frame)

    def start(self, end: "ReplicaEnd", request: WireRequest) -> None:
        """Run an attempt for this end.

        Raises `KeyError` for a request without an id, `ValueError` for the id of a running attempt.
        """
        attempt_id = request["attempt_id"]
        if attempt_id in self.attempts:
            raise ValueError(f"attempt {attempt_id} is running")
        self.attempts[attempt_id] = end
        try:
            self._submit(unpack_request(request))
        except RequestError as error:
            self.publish([RequestOutputs(attempt_id, [], ended=True, error=error)])
        except Exception:
            self.publish([_failed(attempt_id)])

    def cancel(self, end: "ReplicaEnd", attempt_id: str) -> None:
        """Abort the attempt if it is running and belongs to this end."""
        if self.attempts.get(attempt_id) is end:
            del self.attempts[attempt_id]
            self._abort(attempt_id)

    def unsent_bytes(self) -> int:
        """Return the unsent bytes of the slowest ingress."""
        return max((end.unsent_bytes for end in list(self.ends)), default=0)

    async def drained(self) -> None:
        """Wait until every ingress has disconnected.

        An ingress disconnects when this replica is leaving and has no more attempts of it.
        """
        while self.ends:
            self.ended.clear()
            await self.ended.wait()

    def close(self) -> None:
        """Close all links because this replica is leaving."""
        if self._server is not None:
            self._server.close()
        for end in self.ends:
            end.send([], LossReason.LEFT)
        for end in self._unauthenticated:
            end.abort()

    def connected(self, end: "ReplicaEnd") -> None:
        """Register a new connection, which is not authenticated yet.

        Above the limit, closes the oldest connection rather than the newest: otherwise a client
        that keeps connections open would lock out the ingress.
        """
        self._unauthenticated[end] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.abort()
            self.log_peer_error(f"more than {MAX_UNAUTHENTICATED} unauthenticated connections; the oldest are closed")

    def opened(self, end: "ReplicaEnd") -> None:
        """Register the link of an ingress after its handshake."""
        self._unauthenticated.pop(end, None)
        self.ends.add(end)

    def lost(self, end: "ReplicaEnd") -> None:
        """Abort the attempts of a link that has ended."""
        self._unauthenticated.pop(end, None)
        self.ends.discard(end)
        for attempt_id in [attempt_id for attempt_id, owner in self.attempts.items() if owner is end]:
            self.cancel(end, attempt_id)
        self.ended.set()

    def log_peer_error(self, text: str) -> None:
        """Log an error about unauthenticated peers, at most one every 5 s."""
        now = time.monotonic()
        if now - self._logged_at >= _PEER_ERRORS_EVERY_S:
            self._logged_at = now
            logger.error("%s", text)


class ReplicaEnd(asyncio.Protocol):
    """The replica's side of one ingress's link. Closes a connection without a handshake.

    Each frame contains a heartbeat. Without output, a frame is sent every `HEARTBEAT_S`.
    """

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self._is_open = False
        self._handshake = Handshake.of_replica(server.key)
        self._unpacker = msgpack.Unpacker(use_list=False)
        self._packer = msgpack.Packer()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
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
                if isinstance(message, str):
                    self._server.cancel(self, message)
                else:
                    self._server.start(self, message)
        except _MALFORMED as error:
            logger.error("an ingress sent an invalid message (%r); connection closed", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        self._is_open = False
        self._next.cancel()
        self._server.lost(self)

    def abort(self) -> None:
        """Close at once, without sending the rest."""
        self._is_open = False
        self._transport.abort()

    def send(self, batch: list[RequestOutputs], reason: LossReason | None = None) -> None:
        """Write a frame, unless the link has ended. A reason, or a dead engine, closes the link."""
        if not self._is_open:
            return
        self._next.cancel()
        self._next = self._loop.call_later(HEARTBEAT_S, self.send, [])
        head = reason or self._server.heartbeat() or LossReason.ENGINE_DIED
        items = [item for outputs in batch for item in self._pack(outputs)]
        self._transport.write(b"".join((self._head(head), self._packer.pack_array_header(len(items)), *items)))
        if isinstance(head, LossReason):
            self._is_open = False
            self._transport.close()
        elif self.unsent_bytes > MAX_UNSENT_BYTES:
            logger.warning("an ingress has not read for too long; its link is closed")
            self.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """Return the bytes after the handshake; empty before its end."""
        try:
            self._transport.write(self._handshake.receive(data))
        except HandshakeError as error:
            self._server.log_peer_error(f"the peer at {_peer(self._transport)} {error}; connection closed")
            self._transport.write(error.answer)
            self._transport.close()
        if (rest := self._handshake.rest) is None:
            return b""
        self._is_open = True
        self._server.opened(self)
        self.send([])
        return rest

    def _pack(self, outputs: RequestOutputs) -> list[bytes]:
        try:
            return [self._packer.pack(item) for item in pack_outputs(outputs)]
        except Exception:
            self._server.cancel(self, outputs.request_id)
            return [self._packer.pack(item) for item in pack_outputs(_failed(outputs.request_id))]

    @property
    def unsent_bytes(self) -> int:
        """Bytes accepted neither by the ingress nor by its kernel."""
        return self._transport.get_write_buffer_size()

    def _head(self, heartbeat: WireLoad | LossReason) -> bytes:
        """Pack a heartbeat. A separate method, so that profiles list its cost separately."""
        head: bytes = self._packer.pack_array_header(2) + self._packer.pack(heartbeat)
        return head


class IngressEnd(asyncio.Protocol):
    """The ingress's side of the link to one replica. Open from the first heartbeat.

    A replica with another version or key is lost as `INCOMPATIBLE`.
    """

    def __init__(self, key: str, on_heartbeat: OnHeartbeat) -> None:
        self.lost: asyncio.Future[LossReason] = asyncio.get_running_loop().create_future()
        """Done when the link has ended."""
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
                "the replica at %s sent an invalid frame (%r); connection closed", _peer(self._transport), error
            )
            self._close(LossReason.UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        self._end(LossReason.UNAVAILABLE)

    def start(self, request: WireRequest, on_item: OnItem) -> None:
        """Run an attempt over the open link.

        `on_item` gets its items, and finally a `ReplicaLostError`.
        """
        if self.lost.done():
            on_item(ReplicaLostError(LossReason.REFUSED))
            return
        message = msgpack.packb(request)
        self._attempts[request["attempt_id"]] = on_item
        self._write(message)

    def cancel(self, attempt_id: str) -> None:
        """Make the replica abort this attempt."""
        if self._attempts.pop(attempt_id, None) is not None:
            self._write(msgpack.packb(attempt_id))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _shake_hands(self, data: bytes) -> bytes:
        """Return the bytes after the handshake; empty before its end."""
        try:
            self._write(self._handshake.receive(data))
        except HandshakeError as error:
            logger.error("the replica at %s %s; it gets no requests", _peer(self._transport), error)
            self._close(LossReason.INCOMPATIBLE)
        return self._handshake.rest or b""

    def _close(self, reason: LossReason) -> None:
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
            # A reader that has every finish reason stops reading, so only an incomplete stream gets
            # this error.
            on_item(ReplicaLostError(LossReason.CUT))

    def _end(self, reason: LossReason) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        attempts, self._attempts = self._attempts, {}
        for on_item in attempts.values():
            on_item(ReplicaLostError(reason))


def _failed(attempt_id: str) -> RequestOutputs:
    """Log the current exception and return the error to send to the ingress."""
    logger.exception("attempt %s failed", attempt_id)
    return RequestOutputs(attempt_id, [], ended=True, error=EngineError("the engine failed the request"))


def _peer(transport: asyncio.Transport | None) -> str:
    address = None if transport is None else transport.get_extra_info("peername")
    return "an unknown address" if address is None else f"{address[0]}:{address[1]}"


def _notice_loss(connection: socket.socket) -> None:
    """Make the kernel close the connection when the peer machine is gone, where supported.

    TCP alone would not notice.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = _SILENCE_S // 4
    for option, value in (("KEEPIDLE", quarter), ("KEEPINTVL", quarter), ("USER_TIMEOUT", _SILENCE_S * 1000)):
        if (number := getattr(socket, f"TCP_{option}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
