"""One attempt of a request at one replica, and the state of a replica in this process.

An `Attempt` has its placement, its queue of outputs, its deadline, and the replica reserved for it,
if any. Two containers refer to it: `Replica.attempts` (`ReplicaSet.waiting` before it is placed),
and, once it is sent, the link (`IngressEnd`), which passes its outputs to `receive`.
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
"""Key in a replica's metadata: the limit for an engine step in seconds."""
LEAST_STALL_TIMEOUT_S = 10.0
"""Lower limit of the default stall timeout, and the value for replicas that report none."""


class Condition(StrEnum):
    """SUSPECT: the replica failed a request or fell silent. The next heartbeat makes it OK."""

    OK = "ok"
    SUSPECT = "suspect"


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. The watchdog updates the tick counters."""

    replica_id: str
    metadata: dict[str, Any]
    present: bool = True
    """Whether Ray's controller lets requests go to it. False while the replica is being stopped."""
    condition: Condition = Condition.OK
    reason: str = ""
    """Why the replica is not OK."""
    load: ReplicaLoad | None = None
    attempts: "dict[str, Attempt]" = field(default_factory=dict)
    """Attempts placed here that have not ended, by id."""
    reserved: bool = False
    """Whether only an attempt in quarantine may be placed here."""
    has_beaten: bool = False
    silent_ticks: int = 0
    absent_ticks: int = 0

    @property
    def revision(self) -> str | None:
        """Equal for replicas that give the same tokens for a request. None if not reported."""
        return self.metadata.get("revision")

    @property
    def stall_timeout_s(self) -> float:
        """A step that takes longer than this many seconds means that the engine is stuck."""
        return float(self.metadata.get(STALL_TIMEOUT_S, LEAST_STALL_TIMEOUT_S))


class Attempt:
    """Receives the outputs of one attempt. Not thread-safe. The watchdog may interrupt it."""

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
        """`since`: when the request arrived; older requests are placed first.

        - `deadline`: in seconds of the same clock.
        - `revision`: of the replicas that can continue the request; None before the first output.
        - `reserved`: the replica kept free for this attempt, which may use no other.
        - `needs_slot`: wait here for a free slot rather than in an engine, to keep interruptions of
          streams short.
        - `unread`: the total over all attempts.
        - `on_unread`: called when the attempt ends because its outputs are not read.
        """
        self.attempt_id = attempt_id
        self.request = request
        self.since = since
        self.revision = revision
        self.reserved = reserved
        self.routing = RoutingRequest.of(request, session, needs_slot=needs_slot and reserved is None)
        self.replica: Replica | None = None
        """The replica on which it was placed."""
        self.placement: Placement | None = None
        """The routing policy's record of the attempt, once it is placed."""
        self.is_sent = False
        self.unrouted_ticks = 0
        """Ticks without a possible replica; counted by the watchdog."""
        self._deadline = deadline
        self._items = UnreadItems(unread or UnreadBytes())
        self._is_unread = False
        self._on_unread = on_unread
        self._has_started = False
        self._loss: ReplicaLostError | None = None

    async def next(self) -> list[TokenDelta]:
        """Return the next outputs.

        Raises `ReplicaLostError` if the attempt was lost, or the request's own `RequestError`.
        """
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
        """Queue an item. An exception ends the attempt, after all earlier items.

        Returns False if the reader is too far behind, so that no more items may be sent.
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
        """Drop the unread items. The attempt is no longer read."""
        self._items.clear()

    def interrupt(self, reason: LossReason) -> None:
        """End the attempt at once. `next` then raises `ReplicaLostError`."""
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
    """Sends attempts to replicas. Implemented by `LinkTransport`."""

    def start(self, attempt: Attempt) -> None:
        """Place the attempt on the best replica that has room, and send it there. Does not wait."""

    def stop(self, attempt: Attempt) -> None:
        """Release the attempt and make its replica, if any, abort it. Idempotent, does not wait."""

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        """Listen to a replica, which sends a heartbeat at least every `wire.HEARTBEAT_S`.

        Ends with `ReplicaLostError`.
        """

    def account(self, replica_id: str) -> dict[str, float | None]:
        """Return the routing policy's record of this replica, for operators."""
