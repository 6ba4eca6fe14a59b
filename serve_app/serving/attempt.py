"""One try of one request at one replica, and the ways in which it can be lost while the request lives on.

`Transport` and `ItemStream` are what failover needs of the way to the replicas; `LinkTransport` is the real one.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from serve_app.core.output import TokenDelta
from serve_app.core.request import EngineRequest
from serve_app.errors import ENGINE_DIED, EngineError, RequestTimeoutError, UnavailableError
from serve_app.serving.replica_set import Replica, ReplicaSet
from serve_app.serving.wire import WireItem, WireLoad, unpack_item


class LossReason(StrEnum):
    """Why an attempt was lost."""

    UNAVAILABLE = "unavailable"
    """The connection broke, or could not be made: that is how a death looks."""
    ENGINE_DIED = "engine_died"
    """The replica's engine ended with an error."""
    STALLED = "stalled"
    """The replica was silent, or its engine's step did not end."""
    REFUSED = "refused"
    """The replica took no request: it is ending, or there was no link to send it by. It cannot have died of it."""
    LEFT = "left"
    """The replica is being stopped: scale-down, update, or Ray found it unhealthy."""
    ISOLATION = "isolation"
    """The replica was reserved for another request."""
    CUT = "cut"
    """Something was missing in the stream."""
    UNROUTED = "unrouted"
    """There was no replica that could have taken it."""

    @property
    def is_death(self) -> bool:
        """Whether the replica ended, or might as well have, and the request may be why."""
        return self in (LossReason.UNAVAILABLE, LossReason.ENGINE_DIED, LossReason.STALLED)

    @property
    def is_planned(self) -> bool:
        """Whether somebody wanted the replica to be rid of the attempt."""
        return self in (LossReason.LEFT, LossReason.ISOLATION)

    @property
    def is_suspicious(self) -> bool:
        """Whether the replica should get no requests until it gives a sign of life."""
        return self.is_death or self is LossReason.REFUSED


class ReplicaLostError(Exception):
    """The attempt is over, its request is not. `replica` is the one that lost it, once failover knows."""

    def __init__(self, reason: LossReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.replica: Replica | None = None


OnHeartbeat = Callable[[WireLoad], None]


class ItemStream(Protocol):
    """The items of one attempt. Raises `ReplicaLostError`, `RequestError`."""

    async def __anext__(self) -> WireItem:
        """The next item."""

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""


class Transport(Protocol):
    """The way to the replicas."""

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None, since: float) -> ItemStream:
        """Start an attempt on whichever replica is best, once one has room: earlier `since` first. Does not wait."""

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        """Hear this replica, at least once every `wire.HEARTBEAT_S`. Raises `ReplicaLostError` when that is over."""


class AttemptObserver(Protocol):
    """Told about every attempt. Must neither block nor raise."""

    def started(self, attempt_id: str, num_cached_tokens: int) -> None:
        """The replica has admitted it and found this many of its prompt's tokens in the cache."""

    def refused(self, attempt_id: str, now: float) -> None:
        """The replica had no room for it. `now` is in monotonic seconds."""

    def ended(self, attempt_id: str) -> None:
        """The attempt is over, started or not."""


class Attempt:
    """Reads one attempt's stream; the watchdog may interrupt it. `deadline` is in monotonic seconds."""

    def __init__(
        self,
        request_id: str,
        attempt_id: str,
        stream: ItemStream,
        replicas: ReplicaSet,
        observer: AttemptObserver,
        deadline: float,
    ) -> None:
        self.attempt_id = attempt_id
        self.unrouted_ticks = 0
        """Counted by the watchdog."""
        self._request_id = request_id
        self._stream = stream
        self._replicas = replicas
        self._observer = observer
        self._deadline = deadline
        self._has_started = False
        self._loss: ReplicaLostError | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def replica(self) -> Replica | None:
        """The replica that has the attempt; None while it is not placed."""
        return self._replicas.replica_of(self.attempt_id)

    async def next(self) -> list[TokenDelta]:
        """The next news. Raises `ReplicaLostError` when there will be none, `RequestError` for the request's own."""
        item = await self._next_item()
        try:
            deltas = unpack_item(self._request_id, item)
        except UnavailableError as error:
            raise ReplicaLostError(LossReason.REFUSED) from error
        except EngineError as error:
            if error.code != ENGINE_DIED:
                raise
            raise ReplicaLostError(LossReason.ENGINE_DIED) from error
        if not self._has_started:
            self._look_for_start(deltas)
        return deltas

    def interrupt(self, reason: LossReason) -> None:
        """End the attempt: its reader gets `ReplicaLostError` in place of the next news."""
        if self._loss is None:
            self._loss = ReplicaLostError(reason)
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def _next_item(self) -> WireItem:
        if self._loss is not None:
            raise self._loss
        try:
            async with asyncio.timeout_at(self._deadline) as self._scope:
                return await self._stream.__anext__()
        except TimeoutError:
            if self._loss is not None:
                raise self._loss from None
            raise RequestTimeoutError("the request was not done before its deadline") from None
        finally:
            self._scope = None

    def _look_for_start(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.num_cached_tokens is not None:
                self._has_started = True
                self._observer.started(self.attempt_id, delta.num_cached_tokens)
                return
