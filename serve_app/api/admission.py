"""The bounded queue in front of the engines. Decides who goes on, who waits (in order of arrival), who is refused."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from serve_app.errors import InvalidRequestError, OverloadedError

_SMOOTHING = 0.1
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class Ticket:
    """One place: first in the queue, then at the engines. `async with` waits for the turn and gives the place back."""

    def __init__(self, queue: "AdmissionQueue") -> None:
        self._queue = queue
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.granted_at: float | None = None

    async def __aenter__(self) -> Self:
        await self.turn
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the place back, waiting or not. Idempotent."""
        self._queue._release(self)


class AdmissionQueue:
    """At most `max_ongoing` tickets are granted at a time, at most `max_queued` wait. For one event loop."""

    def __init__(self, max_ongoing: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_ongoing = max_ongoing
        self.max_queued = max_queued
        self._clock = clock
        self._waiting: deque[Ticket] = deque()
        self._granted: set[Ticket] = set()
        self._service_s: float | None = None

    @property
    def ongoing(self) -> int:
        """Requests that went on to the engines and have not ended."""
        return len(self._granted)

    @property
    def queued(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def reserve(self, count: int = 1) -> list[Ticket]:
        """`count` tickets, all or none. Release each of them in the end, used or not.

        Raises `OverloadedError` when they do not fit now, `InvalidRequestError` when they never would.
        """
        capacity = self.max_ongoing + self.max_queued
        if count > capacity:
            raise InvalidRequestError(
                f"`prompt` must hold at most {capacity} prompts here, got {count}", param="prompt"
            )
        if self.ongoing + self.queued + count > capacity:
            raise OverloadedError(
                f"the queue is full ({self.queued} requests wait); retry later", retry_after_s=self.retry_after_s()
            )
        tickets = [Ticket(self) for _ in range(count)]
        self._waiting.extend(tickets)
        self._grant()
        return tickets

    def retry_after_s(self) -> float:
        """When a place should be free: the backlog over the rate at which places were given back so far."""
        if self._service_s is None:
            return _MIN_RETRY_S
        expected = (self.queued + 1) * self._service_s / self.max_ongoing
        return min(max(expected, _MIN_RETRY_S), _MAX_RETRY_S)

    def _grant(self) -> None:
        while self._waiting and len(self._granted) < self.max_ongoing:
            ticket = self._waiting.popleft()
            ticket.granted_at = self._clock()
            self._granted.add(ticket)
            if not ticket.turn.done():
                ticket.turn.set_result(None)

    def _release(self, ticket: Ticket) -> None:
        if ticket in self._granted and ticket.granted_at is not None:
            self._granted.remove(ticket)
            took = self._clock() - ticket.granted_at
            before = took if self._service_s is None else self._service_s
            self._service_s = before + _SMOOTHING * (took - before)
            self._grant()
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            ticket.turn.cancel()
