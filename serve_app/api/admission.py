"""The admission queue for asyncio: requests hold tickets and await their turn.

Handles waiting, cancellation and timeouts. `AdmissionQueue` makes all other decisions.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from serve_app.core.admission_queue import AdmissionQueue
from serve_app.core.fair_queue import Entry
from serve_app.errors import OverloadedError, RequestTimeoutError


@dataclass(frozen=True, slots=True)
class Caller:
    """The client and the urgency of a request.

    client: (tenant, user). Either may be empty; all requests with both empty count as one client.
    priority: lower is served first. deadline: on the queue's clock, in seconds. weight: the
    tenant's share.
    """

    client: tuple[str, str] = ("", "")
    priority: int = 0
    deadline: float = math.inf
    weight: int = 1


class _Waiting(Entry):
    """One HTTP request in the queue, with its tickets that are still waiting."""

    __slots__ = ("tickets",)

    def __init__(self, caller: Caller, cost: int, count: int, priority: int) -> None:
        super().__init__(caller.client, cost, count, priority, caller.weight)
        self.tickets: deque[Ticket] = deque()


class Ticket:
    """One prompt's entry in the queue; once admitted, its slots in the engines.

    `async with` waits for the turn and closes the ticket on exit. It raises `OverloadedError` if
    the queue evicted the request, and `RequestTimeoutError` at its deadline.
    """

    def __init__(self, queue: "AsyncAdmissionQueue", entry: _Waiting, deadline: float) -> None:
        self._queue = queue
        self._deadline = deadline
        self._queued_at = queue.clock()
        self.entry = entry
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the ticket is granted, refused or closed."""
        self.refusal: OverloadedError | None = None
        self.granted_at: float | None = None
        self.is_released = False

    @property
    def waited_s(self) -> float:
        """Time spent waiting for the turn, in seconds."""
        return (self.granted_at if self.granted_at is not None else self._queue.clock()) - self._queued_at

    async def __aenter__(self) -> Self:
        if not self.turn.done():
            left = None if self._deadline == math.inf else self._deadline - self._queue.clock()
            try:
                async with asyncio.timeout(left):
                    await self.turn
            except TimeoutError:
                raise RequestTimeoutError(
                    f"the request's deadline passed after {self.waited_s:.1f} seconds in the queue"
                ) from None
        if self.refusal is not None:
            raise self.refusal
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the queue, or free the slots. Idempotent."""
        self._queue._close(self)

    def release(self) -> None:
        """Release the slots to other requests while the client does not read.

        Call it while no part of the prompt is in an engine.
        """
        self._queue._release(self)

    def reclaim(self) -> None:
        """Reclaim the slots, even if other requests use them. No effect unless released."""
        self._queue._reclaim(self)

    def end_wait(self) -> None:
        """Wake the task that waits for this ticket. Only the queue calls this."""
        if not self.turn.done():
            self.turn.set_result(None)


class AsyncAdmissionQueue:
    """An `AdmissionQueue` with awaitable tickets.

    Not thread-safe: use it on one event loop. No method blocks.
    """

    def __init__(
        self,
        max_ongoing: int,
        max_queued: int,
        *,
        by_priority: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """by_priority: use the priorities that requests ask for.

        Off by default, since any client may ask for any priority.
        """
        self.clock = clock
        self._by_priority = by_priority
        self._queue: AdmissionQueue[_Waiting] = AdmissionQueue(max_ongoing, max_queued)
        self._granted: set[Ticket] = set()

    @property
    def ongoing(self) -> int:
        """Number of sequences in the engines."""
        return self._queue.ongoing

    @property
    def max_ongoing(self) -> int:
        """Number of sequences that the engines can hold."""
        return self._queue.max_ongoing

    @property
    def queued(self) -> int:
        """Number of sequences that wait in the queue."""
        return self._queue.queued

    def set_capacity(self, max_ongoing: int) -> None:
        """Set the number of sequences that the engines can hold.

        Excess ongoing sequences continue. With 0, all requests wait.
        """
        self._queue.set_capacity(max_ongoing)
        self._grant()

    def reserve(self, count: int = 1, cost: int = 1, caller: Caller | None = None) -> list[Ticket]:
        """Return `count` tickets for prompts of `cost` choices each, all or none.

        The caller must close every ticket, used or not. Raises `OverloadedError` if they do not
        fit now or would wait beyond the deadline, and `InvalidRequestError` if they can never fit.
        """
        caller = caller or Caller()
        entry = _Waiting(caller, cost, count, caller.priority if self._by_priority else 0)
        for evicted, refusal in self._queue.add(entry, caller.deadline, self.clock()):
            while evicted.tickets:
                ticket = evicted.tickets.popleft()
                ticket.refusal = refusal
                ticket.end_wait()
        tickets = [Ticket(self, entry, caller.deadline) for _ in range(count)]
        entry.tickets.extend(tickets)
        self._grant()
        return tickets

    def _grant(self) -> None:
        now = self.clock()
        for entry in self._queue.admit(now):
            ticket = entry.tickets.popleft()
            ticket.granted_at = now
            self._granted.add(ticket)
            ticket.end_wait()

    def _release(self, ticket: Ticket) -> None:
        if ticket in self._granted and not ticket.is_released:
            ticket.is_released = True
            self._queue.release(ticket.entry)
            self._grant()

    def _reclaim(self, ticket: Ticket) -> None:
        if ticket.is_released:
            ticket.is_released = False
            self._queue.reclaim(ticket.entry)

    def _close(self, ticket: Ticket) -> None:
        self._reclaim(ticket)
        if ticket in self._granted:
            self._granted.remove(ticket)
            self._queue.end(ticket.entry, self.clock())
            self._grant()
        elif ticket in ticket.entry.tickets:
            ticket.entry.tickets.remove(ticket)
            self._queue.withdraw(ticket.entry)
            ticket.end_wait()
