"""The amount charged within the last minute. Pure: time is an argument, in seconds, monotonic.

This is a sliding window, not a token bucket: a bucket of one minute's amount allows twice that
amount in a minute.
"""

from collections import deque

WINDOW_S = 60
_SLOT_S = 1


class RateWindow:
    """Charges by second. A second is dropped once all of it is older than the window.

    If each charge waits for `wait_s`, no `WINDOW_S` seconds contain more than the limit. Under
    constant load at least 60/61 of the limit can be used.
    """

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()
        self._total = 0

    def total(self, now: float) -> int:
        """Return the amount that counts at `now`."""
        while self._slots and self._slots[0][0] + _SLOT_S + WINDOW_S <= now:
            self._total -= self._slots.popleft()[1]
        return self._total

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Return how long until `amount` more fits in `limit`, in seconds.

        This assumes no other charges, and an `amount` of at most `limit`.
        """
        excess = self.total(now) + amount - limit
        wait = 0.0
        for second, charged in self._slots:
            if excess <= 0:
                break
            excess -= charged
            wait = second + _SLOT_S + WINDOW_S - now
        return wait

    def charge(self, amount: int, now: float) -> int:
        """Count `amount`. Returns the second, for `give_back`."""
        second = int(now // _SLOT_S) * _SLOT_S
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append([second, 0])
        self._slots[-1][1] += amount
        self._total += amount
        return second

    def give_back(self, amount: int, second: int) -> None:
        """Return `amount` of the charge in `second`, unless that second has left the window."""
        for slot in reversed(self._slots):
            if slot[0] == second:
                slot[1] -= amount
                self._total -= amount

    def reset_s(self, now: float) -> float:
        """Return how long until the window is empty, in seconds."""
        return self._slots[-1][0] + _SLOT_S + WINDOW_S - now if self.total(now) else 0.0
