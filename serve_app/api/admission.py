"""The queue in front of the engines: who goes on, who waits, who is refused, and when to come back.

It counts sequences (prompts times choices), as engines do. Requests wait here rather than in an engine, so that each
takes the first place that becomes free anywhere. Order and shares are `FairQueue`'s, return times `PromiseBook`'s.
"""

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from serve_app.api.fair_queue import Entry, FairQueue
from serve_app.api.promises import PromiseBook, ServiceRate
from serve_app.errors import InvalidRequestError, OverloadedError, RequestTimeoutError

_MOST_HELD = 0.75
"""Part of the queue that promises may keep from newcomers. The rest of it waits, so that no place is ever idle."""
_CALM = 0.9
"""The first refused clients come back when the queue is only so full: one place is never free for all of them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and for what.

    client: (API key, user), either may be empty; those who name neither are one client.
    body: the request's bytes; a refused client that comes back is known by repeating them.
    priority: lower is served first. deadline: on the queue's clock, in seconds.
    """

    client: tuple[str, str] = ("", "")
    body: bytes = b""
    priority: int = 0
    deadline: float = math.inf


class _Waiting(Entry):
    """A request's tickets that wait."""

    __slots__ = ("caller", "tickets")

    def __init__(self, caller: Caller, count: int, cost: int, priority: int, kept: bool) -> None:
        super().__init__(caller.client, cost, count, priority, kept)
        self.caller = caller
        self.tickets: deque[Ticket] = deque()


class Ticket:
    """One prompt's place: first in the queue, then at the engines. `async with` waits for the turn and gives it back.

    Entering raises `OverloadedError` when the request had to give way, `RequestTimeoutError` at its deadline.
    """

    def __init__(self, queue: "AdmissionQueue", waiting: _Waiting) -> None:
        self._queue = queue
        self._deadline = waiting.caller.deadline
        self.cost = waiting.cost
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting: _Waiting | None = waiting
        self.refusal: OverloadedError | None = None
        self.queued_at = queue.clock()
        self.granted_at: float | None = None

    @property
    def waited_s(self) -> float:
        """How long it waited for its turn, in seconds."""
        return (self.granted_at if self.granted_at is not None else self._queue.clock()) - self.queued_at

    async def __aenter__(self) -> Self:
        if not self.turn.done():
            left = None if self._deadline == math.inf else self._deadline - self._queue.clock()
            try:
                async with asyncio.timeout(left):
                    await self.turn
            except TimeoutError:
                raise RequestTimeoutError(
                    f"the request's time was over after {self.waited_s:.1f} seconds in the queue"
                ) from None
        if self.refusal is not None:
            raise self.refusal
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the place back, waiting or not. Idempotent."""
        self._queue._release(self)

    def leave_queue(self) -> None:
        """For the queue: wake whoever waits for this ticket's turn."""
        self.waiting = None
        if not self.turn.done():
            self.turn.set_result(None)


class AdmissionQueue:
    """At most `max_queued` sequences wait; the next one goes on while fewer than `max_ongoing` are ongoing.

    The last one to go on may exceed that by its own further choices: so any request starts sometime, however large,
    and no place stays empty for its sake. For one event loop; nothing here blocks, and everything is O(log n).
    """

    def __init__(
        self,
        max_ongoing: int,
        max_queued: int,
        *,
        by_priority: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`by_priority`: honour what requests say of their priority. Anybody may say anything: off by default."""
        self.max_ongoing = max_ongoing
        self.max_queued = max_queued
        self.clock = clock
        self.promises = PromiseBook()
        self._by_priority = by_priority
        self._most_ongoing = max_ongoing
        self._queue = FairQueue()
        self._rate = ServiceRate()
        self._ongoing = 0
        self._granted: set[Ticket] = set()

    @property
    def ongoing(self) -> int:
        """Sequences that went on to the engines and have not ended."""
        return self._ongoing

    @property
    def queued(self) -> int:
        """Sequences that wait here."""
        return self._queue.size

    def set_capacity(self, max_ongoing: int) -> None:
        """The engines hold so many now. What is ongoing beyond it stays; 0 lets everybody wait."""
        self.max_ongoing = max_ongoing
        self._most_ongoing = max(self._most_ongoing, max_ongoing)
        self._grant()

    def reserve(self, count: int = 1, cost: int = 1, caller: Caller | None = None) -> list[Ticket]:
        """`count` tickets for prompts of `cost` choices each, all or none. Release each in the end, used or not.

        Raises `OverloadedError` when they do not fit now, or would wait beyond the deadline; `InvalidRequestError`
        when they never fit.
        """
        caller = caller or Caller()
        capacity = self._most_ongoing + self.max_queued
        if count > capacity:
            raise InvalidRequestError(
                f"`prompt` must hold at most {capacity} prompts here, got {count}", param="prompt"
            )
        now = self.clock()
        kept = self.promises.outstanding > 0 and self.promises.redeem(_identity(caller), now)
        waiting = _Waiting(caller, count, cost, caller.priority if self._by_priority else 0, kept)
        self._check_deadline(waiting, now)
        self._make_room(waiting, now)
        tickets = [Ticket(self, waiting) for _ in range(count)]
        waiting.tickets.extend(tickets)
        self._queue.add(waiting)
        self._grant()
        return tickets

    def _check_deadline(self, waiting: _Waiting, now: float) -> None:
        """Refuse what could only time out in the queue, as far as that is known."""
        left, rate = waiting.caller.deadline - now, self._served_per_s(now)
        if left * rate >= self._queue.size or not self._rate.known:
            return
        expected = self._queue.ahead_of(waiting) / rate
        if expected > left:
            raise OverloadedError(
                f"the request would wait about {expected:.0f} seconds, and has {max(left, 0):.0f}",
                code="wait_exceeds_timeout",
                retry_after_s=expected - left,
            )

    def _make_room(self, waiting: _Waiting, now: float) -> None:
        """Refuse `waiting`, or others for its sake, if not all fit. Places that are promised are no newcomer's."""
        held = 0 if waiting.kept else min(self.promises.held(now), int(self.max_queued * _MOST_HELD))
        free = max(self.max_ongoing - self._ongoing, 0) + self.max_queued - held - self._queue.size
        # What is larger than everything we hold needs all of it.
        size = min(waiting.size, max(self.max_ongoing + self.max_queued, 1))
        if size <= free:
            return
        # Even where there are too many already, a swap makes them no more.
        needed = min(size - free, waiting.size)
        yielding = self._queue.giving_way(waiting, needed)
        if not yielding:
            reason = f"the queue is full: {self._queue.size} sequences wait, {held} places are promised"
            raise self._refusal(waiting, now, reason, "promise_broken" if waiting.kept else None)
        for entry in yielding:
            assert isinstance(entry, _Waiting)
            refusal = self._refusal(entry, now, "the queue is full, and others have had less of it", "queue_share")
            self._queue.drop(entry, entry.remaining)
            for ticket in entry.tickets:
                ticket.refusal = refusal
                ticket.leave_queue()

    def _refusal(self, waiting: _Waiting, now: float, reason: str, code: str | None = None) -> OverloadedError:
        missing = max(self._queue.size - int(self.max_queued * _CALM), 0)
        caller, rate = waiting.caller, self._served_per_s(now)
        wait = self.promises.make(caller.client, _identity(caller), waiting.size, missing, rate, now)
        if wait == math.inf:
            message = f"{reason}, and no place can be promised within the hour"
        else:
            message = f"{reason}; a place is kept for the same request in {wait:.0f} seconds"
        return OverloadedError(message, code=code, retry_after_s=wait)

    def _served_per_s(self, now: float) -> float:
        # While all replicas are away: as with one place, for they will be back.
        return self._rate.per_place(now) * max(self.max_ongoing, 1)

    def _grant(self) -> None:
        while self._queue.size and self._ongoing < self.max_ongoing:
            waiting = self._queue.take()
            assert isinstance(waiting, _Waiting)
            ticket = waiting.tickets.popleft()
            ticket.granted_at = self.clock()
            self._granted.add(ticket)
            self._ongoing += ticket.cost
            ticket.leave_queue()
        self._rate.taken(self.max_ongoing if self._ongoing >= self.max_ongoing else 0, self.clock())

    def _release(self, ticket: Ticket) -> None:
        if ticket in self._granted:
            self._granted.remove(ticket)
            self._rate.ended(ticket.cost, self.clock())
            self._ongoing -= ticket.cost
            self._grant()
        elif ticket.waiting is not None:
            ticket.waiting.tickets.remove(ticket)
            self._queue.drop(ticket.waiting, 1)
            ticket.leave_queue()


def _identity(caller: Caller) -> bytes:
    digest = hashlib.blake2b(caller.body, digest_size=16)
    for part in caller.client:
        digest.update(b"\0" + part.encode())
    return digest.digest()
