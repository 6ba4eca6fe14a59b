"""How fast places at the engines become free, and from that when a refused client should try again. Pure."""

import math

MAX_RETRY_AFTER_S = 60.0
"""A client that is told more gives up, and an estimate for later than this is worth little."""
_SPREAD = 0.2
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_ENOUGH = 8


class RetryAfter:
    """Turns estimated waits into `Retry-After`: spread by 20 % either way, from 1 to 60 seconds.

    All requests of a burst are refused with one estimate; without the spread they would return as a burst.
    """

    def __init__(self) -> None:
        self._count = 0

    def spread(self, seconds: float) -> float:
        """The `Retry-After` in seconds of one client, for an estimate of `seconds` (which may be infinite)."""
        # Multiples of the golden ratio: even over any stretch of refusals, and the same in every run.
        factor = 1 + _SPREAD * (2 * (self._count * _GOLDEN_RATIO % 1) - 1)
        self._count += 1
        return max(1.0, min(seconds, MAX_RETRY_AFTER_S / (1 + _SPREAD)) * factor)


class ServiceRate:
    """How fast places become free, measured while all of them are taken: only then does it say what overload brings.

    Keeps place-seconds and the sequences that ended in them, both discounted with every sequence that ends.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._place_s = 0.0
        self._places = 0
        self._at = 0.0

    def taken(self, places: int, now: float) -> None:
        """From now on all of this many places are taken; 0: some place is free."""
        self._advance(now)
        self._places = places

    def ended(self, cost: int, now: float) -> None:
        """`cost` sequences ended, and their places do not count as free yet."""
        self._advance(now)
        if self._places:
            discount = 1.0 - 1.0 / max(256, 4 * self._places)
            self._ended = self._ended * discount + cost
            self._place_s *= discount

    @property
    def known(self) -> bool:
        """Whether enough sequences have ended to rely on it."""
        return self._ended >= _ENOUGH

    def per_place(self, now: float) -> float:
        """Sequences per second and place; one while there is nothing to measure."""
        self._advance(now)
        measured = (self._ended + 1.0) / (self._place_s + 1.0)
        if self.known or not self._places:
            return measured
        # None or few have ended yet: assume that those which run are half done.
        return max(measured, 1.0 / (1.0 + 2.0 * self._place_s / self._places))

    def _advance(self, now: float) -> None:
        self._place_s += self._places * (now - self._at)
        self._at = now
