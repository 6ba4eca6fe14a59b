"""Estimates how fast engine slots become free, and when refused clients should retry. Pure."""

import math

MAX_RETRY_AFTER_S = 60.0
"""Upper limit: longer estimates are unreliable, and clients give up."""
_SPREAD = 0.2
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_ENOUGH = 8


class RetryAfter:
    """Turns estimated waits into `Retry-After`: spread by 20 % either way, from 1 to 60 seconds.

    All requests of a burst get the same estimate. Without the spread they would return as a burst.
    """

    def __init__(self) -> None:
        self._count = 0

    def spread(self, seconds: float) -> float:
        """Return one client's `Retry-After` in seconds.

        `seconds`: the estimated wait, may be infinite.
        """
        # Multiples of the golden ratio are evenly spread over any series of refusals, and
        # reproducible.
        factor = 1 + _SPREAD * (2 * (self._count * _GOLDEN_RATIO % 1) - 1)
        self._count += 1
        return max(1.0, min(seconds, MAX_RETRY_AFTER_S / (1 + _SPREAD)) * factor)


class ServiceRate:
    """Rate at which slots become free, measured only while all slots are taken, as in overload.

    Accumulates slot-seconds and the sequences that ended in them. Each ended sequence discounts
    both.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._slot_s = 0.0
        self._slots = 0
        self._at = 0.0

    def taken(self, slots: int, now: float) -> None:
        """Record that from now on all `slots` slots are taken; 0: a slot is free."""
        self._advance(now)
        self._slots = slots

    def ended(self, cost: int, now: float) -> None:
        """Record that `cost` sequences ended. Their slots do not count as free yet."""
        self._advance(now)
        if self._slots:
            discount = 1.0 - 1.0 / max(256, 4 * self._slots)
            self._ended = self._ended * discount + cost
            self._slot_s *= discount

    @property
    def known(self) -> bool:
        """Whether enough sequences have ended for a reliable rate."""
        return self._ended >= _ENOUGH

    def per_slot(self, now: float) -> float:
        """Return sequences per second and slot; 1 before any measurement."""
        self._advance(now)
        measured = (self._ended + 1.0) / (self._slot_s + 1.0)
        if self.known or not self._slots:
            return measured
        # Few or no sequences have ended yet: assume that the running ones are half done.
        return max(measured, 1.0 / (1.0 + 2.0 * self._slot_s / self._slots))

    def _advance(self, now: float) -> None:
        self._slot_s += self._slots * (now - self._at)
        self._at = now
