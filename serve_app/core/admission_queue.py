"""The queue in front of the engines: which requests are admitted, wait or are refused, and when to retry. Pure.

It counts sequences (prompts times choices), as engines do. Requests wait here and not in an engine, so that each takes
the first slot that becomes free in any engine. `FairQueue` decides order and shares. A refusal contains a retry time,
estimated from the queue's length and the measured service rate. Time is an argument, in seconds, never going back.
"""

from typing import Generic, Protocol

from serve_app.core.fair_queue import E, FairQueue
from serve_app.core.service_rate import RetryAfter, ServiceRate
from serve_app.errors import InvalidRequestError, OverloadedError


class Place(Protocol):
    """A request's slots in the engines; other requests may use them while no part of it is in an engine."""

    def lend(self) -> None:
        """Nothing is, for now."""

    def take_back(self) -> None:
        """The request needs its slots again."""


class AdmissionQueue(Generic[E]):
    """At most `max_queued` sequences wait; the next one is admitted while fewer than `max_ongoing` are ongoing.

    The last admitted request may exceed `max_ongoing` by its further choices. So even a large request starts at some
    point, and no slot stays empty for it. After every change the caller asks `admit` for the admitted requests. All
    operations are O(log n).
    """

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self.max_ongoing = max_ongoing
        self.max_queued = max_queued
        self.ongoing = 0
        """Sequences that went on to the engines and have not ended."""
        self._most_ongoing = max_ongoing
        self._queue: FairQueue[E] = FairQueue()
        self._rate = ServiceRate()
        self._retry_after = RetryAfter()

    @property
    def queued(self) -> int:
        """Sequences that wait here."""
        return self._queue.size

    def set_capacity(self, max_ongoing: int) -> None:
        """The engines now have room for `max_ongoing` sequences. Excess ongoing ones stay; with 0 all requests wait."""
        self.max_ongoing = max_ongoing
        self._most_ongoing = max(self._most_ongoing, max_ongoing)

    def add(self, entry: E, deadline: float, now: float) -> list[tuple[E, OverloadedError]]:
        """Enqueue `entry`, all of it or nothing. Returns those that had to leave the queue for its sake, and why.

        Raises `OverloadedError` when it does not fit now, or would wait beyond `deadline`; `InvalidRequestError` when
        it never fits.
        """
        capacity = self._most_ongoing + self.max_queued
        if entry.remaining > capacity:
            raise InvalidRequestError(
                f"`prompt` must contain at most {capacity} prompts (this server's slots), got {entry.remaining}",
                param="prompt",
            )
        self._check_share(entry, now)
        self._check_deadline(entry, deadline, now)
        evicted = self._make_room(entry, now)
        self._queue.add(entry)
        return evicted

    def admit(self, now: float) -> list[E]:
        """Admit requests: returns an entry once for each of its parts whose turn has come, in order."""
        admitted: list[E] = []
        while self._queue.size and self.ongoing < self.max_ongoing:
            entry = self._queue.take()
            self.ongoing += entry.cost
            admitted.append(entry)
        self._rate.taken(self.max_ongoing if self.ongoing >= self.max_ongoing else 0, now)
        return admitted

    def end(self, entry: E, now: float) -> None:
        """A part of `entry` that was admitted has ended."""
        self._rate.ended(entry.cost, now)
        self.ongoing -= entry.cost

    def lend(self, entry: E) -> None:
        """An admitted part of `entry` has not ended, but needs no slot for a while."""
        self.ongoing -= entry.cost

    def take_back(self, entry: E) -> None:
        """A part that gave up its slot needs it again. It has started, and does not wait for a turn."""
        self.ongoing += entry.cost

    def withdraw(self, entry: E) -> None:
        """A part of `entry` no longer waits."""
        self._queue.drop(entry, 1)

    def _check_share(self, entry: E, now: float) -> None:
        """One request has at most half of the queue: those of its sequences that have to wait."""
        free = 0 if self._queue.size else max(self.max_ongoing - self.ongoing, 0)
        waiting = entry.size - entry.cost * min(-(-free // entry.cost), entry.remaining)
        half = max(-(-self.max_queued // 2), 1)
        if waiting > half:
            reason = f"{waiting} sequences of this request would wait, but at most {half} of one request may"
            reason += ": send fewer prompts or choices (`n`, `best_of`) at once"
            raise self._refusal(now, reason, code="queue_share")

    def _check_deadline(self, entry: E, deadline: float, now: float) -> None:
        """Refuse what could only time out in the queue, as far as that is known."""
        left, rate = deadline - now, self._served_per_s(now)
        if left * rate >= self._queue.size or not self._rate.known:
            return
        expected = self._queue.ahead_of(entry) / rate
        if expected > left:
            raise OverloadedError(
                f"the request would wait about {expected:.0f} seconds, but its timeout leaves {max(left, 0):.0f}",
                code="wait_exceeds_timeout",
                retry_after_s=self._retry_after.spread(expected - left),
            )

    def _make_room(self, entry: E, now: float) -> list[tuple[E, OverloadedError]]:
        """Refuse `entry`, or take others out for its sake, if not all fit."""
        free = max(self.max_ongoing - self.ongoing, 0) + self.max_queued - self._queue.size
        # What is larger than everything we hold needs all of it.
        size = min(entry.size, max(self.max_ongoing + self.max_queued, 1))
        if size <= free:
            return []
        # Even where there are too many already, a swap makes them no more.
        needed = min(size - free, entry.size)
        yielding = self._queue.giving_way(entry, needed)
        if not yielding:
            raise self._refusal(now, f"the queue is full ({self._queue.size} sequences)")
        evicted = []
        for other in yielding:
            reason = "the queue is full, and other clients use less of their share"
            evicted.append((other, self._refusal(now, reason, code="queue_share")))
            self._queue.drop(other, other.remaining)
        return evicted

    def _refusal(self, now: float, reason: str, *, code: str | None = None) -> OverloadedError:
        """The estimated wait is the time in which everything that is queued now is served."""
        wait = self._retry_after.spread(self._queue.size / self._served_per_s(now))
        return OverloadedError(f"{reason}; try again in {wait:.0f} seconds", code=code, retry_after_s=wait)

    def _served_per_s(self, now: float) -> float:
        # While all replicas are away: as with one place, for they will be back.
        return self._rate.per_place(now) * max(self.max_ongoing, 1)
