"""One try of one request at one replica, and the replica: what this process knows of both.

An `Attempt` holds its placement, its queue of outputs, its deadline, and the replica reserved for it, if any. Two
containers refer to it: `Replica.attempts` (before it is placed, `ReplicaSet.waiting`), and, once it is sent, the link
(`IngressEnd`), which passes its outputs to `receive`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.errors import ENGINE_DIED, EngineError, RequestTimeoutError, UnavailableError
from serve_app.fleet.link import OnHeartbeat
from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.routing_policy import Placement, RoutingRequest
from serve_app.fleet.unread import UnreadBytes, UnreadItems
from serve_app.fleet.wire import WireItem, unpack_item

STALL_TIMEOUT_S = "stall_timeout_s"
"""In a replica's metadata: how many seconds its engine's steps may take."""
LEAST_STALL_TIMEOUT_S = 10.0
"""What these are, unless set, where steps are fast or the replica does not say."""


class Condition(StrEnum):
    """SUSPECT: it failed a request or fell silent; a heartbeat makes it OK again."""

    OK = "ok"
    SUSPECT = "suspect"


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. Counters of ticks are the watchdog's."""

    replica_id: str
    metadata: dict[str, Any]
    present: bool = True
    """Whether Ray's controller lets requests go to it; a replica that is being stopped is not."""
    condition: Condition = Condition.OK
    reason: str = ""
    """Why it is not OK."""
    load: ReplicaLoad | None = None
    attempts: "dict[str, Attempt]" = field(default_factory=dict)
    """Those placed here that have not ended, by their ids."""
    reserved: bool = False
    """Whether only an attempt in quarantine may come here."""
    has_beaten: bool = False
    silent_ticks: int = 0
    absent_ticks: int = 0

    @property
    def revision(self) -> str | None:
        """Replicas of equal revisions give the same tokens for the same request; None where it does not say."""
        return self.metadata.get("revision")

    @property
    def stall_timeout_s(self) -> float:
        """Its engine counts as stuck when a step takes longer; seconds."""
        return float(self.metadata.get(STALL_TIMEOUT_S, LEAST_STALL_TIMEOUT_S))


class Attempt:
    """Reads one attempt's outputs; the watchdog may interrupt it. For one event loop."""

    def __init__(
        self,
        attempt_id: str,
        request: EngineRequest,
        *,
        since: float,
        deadline: float,
        session: str | None = None,
        revision: str | None = None,
        reserved: Replica | None = None,
        needs_slot: bool = False,
        unread: UnreadBytes | None = None,
        on_unread: Callable[[], None] | None = None,
    ) -> None:
        """`since`: when its request came, earlier ones are placed first; `deadline`: in seconds of the same clock.

        `revision`: of the replicas that can continue the request, None while no output is known. `reserved`: the
        replica that is kept free for it, the only one it may go to. `needs_slot`: it waits here for a free slot rather
        than in an engine, as others may have their streams interrupted no longer than need be.
        `unread`: what all attempts hold. `on_unread`: called when it ends for want of a reader.
        """
        self.attempt_id = attempt_id
        self.request = request
        self.since = since
        self.revision = revision
        self.reserved = reserved
        self.routing = RoutingRequest.of(request, session, needs_slot=needs_slot and reserved is None)
        self.replica: Replica | None = None
        """Where it was placed."""
        self.placement: Placement | None = None
        """The routing policy's account of it, once it is placed."""
        self.is_sent = False
        self.unrouted_ticks = 0
        """Counted by the watchdog."""
        self._deadline = deadline
        self._items = UnreadItems(unread or UnreadBytes())
        self._is_unread = False
        self._on_unread = on_unread
        self._has_started = False
        self._loss: ReplicaLostError | None = None

    async def next(self) -> list[TokenDelta]:
        """The next outputs. Raises `ReplicaLostError` when there will be none, `RequestError` for the request's own."""
        item = await self._next_item()
        try:
            deltas = unpack_item(self.request.request_id, item)
        except UnavailableError as error:
            raise ReplicaLostError(LossReason.REFUSED) from error
        except EngineError as error:
            if error.code != ENGINE_DIED:
                raise
            raise ReplicaLostError(LossReason.ENGINE_DIED) from error
        if not self._has_started:
            self._look_for_start(deltas)
        return deltas

    def receive(self, item: WireItem | Exception) -> bool:
        """Queue an item of its outputs; an exception ends the attempt, after all items that came before.

        Returns whether to go on: not when its reader is so far behind that there must be no more.
        """
        if self._is_unread:
            return False
        self._items.put(item)
        if self._items.are_too_many:
            self._is_unread = True
            self._items.put(ReplicaLostError(LossReason.UNREAD))
            if self._on_unread is not None:
                self._on_unread()
        return not self._is_unread

    def close(self) -> None:
        """Nobody reads it any more."""
        self._items.clear()

    def interrupt(self, reason: LossReason) -> None:
        """End it at once: its reader gets `ReplicaLostError` in place of the next outputs."""
        if self._loss is None:
            self._loss = ReplicaLostError(reason)
            self._items.clear()
            self._items.put(self._loss)

    async def _next_item(self) -> WireItem:
        if self._loss is not None:
            raise self._loss
        try:
            async with asyncio.timeout_at(self._deadline):
                item = await self._items.get()
        except TimeoutError:
            raise RequestTimeoutError("the request did not finish before its deadline") from None
        if self._loss is not None:
            raise self._loss
        if isinstance(item, Exception):
            raise item
        return item

    def _look_for_start(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.num_cached_tokens is not None:
                self._has_started = True
                if self.placement is not None:
                    self.placement.started(delta.num_cached_tokens)
                return


class Transport(Protocol):
    """The way to the replicas. `LinkTransport` is the real one."""

    def start(self, attempt: Attempt) -> None:
        """Place it on whichever replica is best, once one has room, and take it there. Does not wait."""

    def stop(self, attempt: Attempt) -> None:
        """Let go of it: its replica, if any, is told to abort. Idempotent, does not wait."""

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        """Listen to this replica: a heartbeat comes at least every `wire.HEARTBEAT_S`. Ends with `ReplicaLostError`."""

    def account(self, replica_id: str) -> dict[str, float | None]:
        """The routing policy's account of this replica, for operators."""
