"""The queue before the engines: which requests are admitted, wait or are refused. Pure.

Counts sequences (prompts times choices), like the engines. Requests wait here rather than in an
engine, so that each takes the first slot that becomes free in any engine. `FairQueue` decides order
and shares. A refusal has a retry time, estimated from the queue's length and the measured service
rate. Time is an argument, in seconds, and must not go backwards.
"""

from typing import Generic, Protocol

from serve_app.core.fair_queue import E, FairQueue
from serve_app.core.service_rate import RetryAfter, ServiceRate
from serve_app.errors import InvalidRequestError, OverloadedError


class AdmissionSlots(Protocol):
    """A request's slots in the engines.

    Other requests may use them while no part of it is in an engine.
    """

    def release(self) -> None:
        """Release the slots to other requests, because no part of the request is in an engine."""

    def reclaim(self) -> None:
        """Reclaim the slots for the request."""


class AdmissionQueue(Generic[E]):
    """Queues at most `max_queued` sequences; admits while fewer than `max_ongoing` are ongoing.

    The last admitted request may exceed `max_ongoing` by its further choices. So even a large
    request starts eventually, and no slot stays empty for it. After every change, call `admit` for
    the newly admitted requests. All operations are O(log n).
    """

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self.max_ongoing = max_ongoing
        self.max_queued = max_queued
        self.ongoing = 0
        """Sequences that were admitted to the engines and have not ended."""
        self._most_ongoing = max_ongoing
        self._queue: FairQueue[E] = FairQueue()
        self._rate = ServiceRate()
        self._retry_after = RetryAfter()

    @property
    def queued(self) -> int:
        """Sequences waiting here."""
        return self._queue.size

    def set_capacity(self, max_ongoing: int) -> None:
        """Set the engines' capacity in sequences.

        Excess ongoing ones continue; with 0 all requests wait.
        """
        self.max_ongoing = max_ongoing
        self._most_ongoing = max(self._most_ongoing, max_ongoing)

    def add(self, entry: E, deadline: float, now: float) -> list[tuple[E, OverloadedError]]:
        """Enqueue all parts of `entry`, or raise.

        Returns the entries evicted for it, with their errors. Raises `OverloadedError` if it does
        not fit now or would wait beyond `deadline`, and `InvalidRequestError` if it can never fit.
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
        """Admit requests. Returns an entry once for each of its admitted parts, in order."""
        admitted: list[E] = []
        while self._queue.size and self.ongoing < self.max_ongoing:
            entry = self._queue.take()
            self.ongoing += entry.cost
            admitted.append(entry)
        self._rate.taken(self.max_ongoing if self.ongoing >= self.max_ongoing else 0, now)
        return admitted

    def end(self, entry: E, now: float) -> None:
        """Record that an admitted part of `entry` has ended."""
        self._rate.ended(entry.cost, now)
        self.ongoing -= entry.cost

    def release(self, entry: E) -> None:
        """Release the slots of an admitted part that has not ended but needs none for a while."""
        self.ongoing -= entry.cost

    def reclaim(self, entry: E) -> None:
        """Reclaim the slots of a part. It has already started, so it does not queue again."""
        self.ongoing += entry.cost

    def withdraw(self, entry: E) -> None:
        """Remove a waiting part of `entry`."""
        self._queue.drop(entry, 1)

    def _check_share(self, entry: E, now: float) -> None:
        """Refuse a request whose waiting sequences would take more than half of the queue."""
        free = 0 if self._queue.size else max(self.max_ongoing - self.ongoing, 0)
        waiting = entry.size - entry.cost * min(-(-free // entry.cost), entry.remaining)
        half = max(-(-self.max_queued // 2), 1)
        if waiting > half:
            reason = f"{waiting} sequences of this request would wait, but at most {half} of one request may"
            reason += ": send fewer prompts or choices (`n`, `best_of`) at once"
            raise self._refusal(now, reason, code="queue_share")

    def _check_deadline(self, entry: E, deadline: float, now: float) -> None:
        """Refuse a request that would time out in the queue, if the service rate is known."""
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
        """If not all fit: return the entries to evict for `entry`, or raise `OverloadedError`."""
        free = max(self.max_ongoing - self.ongoing, 0) + self.max_queued - self._queue.size
        # An entry larger than the whole capacity needs all of it.
        size = min(entry.size, max(self.max_ongoing + self.max_queued, 1))
        if size <= free:
            return []
        # If the queue is over its limit, evict no more than `entry` adds.
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
        """Return the error. Its retry time estimates how long the current queue takes."""
        wait = self._retry_after.spread(self._queue.size / self._served_per_s(now))
        return OverloadedError(f"{reason}; try again in {wait:.0f} seconds", code=code, retry_after_s=wait)

    def _served_per_s(self, now: float) -> float:
        # While all replicas are away, assume one slot, because they will return.
        return self._rate.per_slot(now) * max(self.max_ongoing, 1)
