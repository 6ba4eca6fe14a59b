"""The amount charged within the last minute. Pure: time is an argument, in seconds, never going back.

A sliding window and not a token bucket: a bucket of one minute's amount allows twice that amount in a minute.
"""

from collections import deque

WINDOW_S = 60
_SLOT_S = 1


class RateWindow:
    """Charges by the second in which they came. A second is forgotten when all of it is older than the window.

    So within any `WINDOW_S` seconds no more is charged than the limit that each `wait_s` was asked about, and a
    limit that is used up all the time is used to 60/61 at least.
    """

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()
        self._total = 0

    def total(self, now: float) -> int:
        """What counts at `now`."""
        while self._slots and self._slots[0][0] + _SLOT_S + WINDOW_S <= now:
            self._total -= self._slots.popleft()[1]
        return self._total

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """How long until `amount` more keep the total within `limit`, if nothing else is charged; at most `limit`."""
        excess = self.total(now) + amount - limit
        wait = 0.0
        for second, charged in self._slots:
            if excess <= 0:
                break
            excess -= charged
            wait = second + _SLOT_S + WINDOW_S - now
        return wait

    def charge(self, amount: int, now: float) -> int:
        """Count `amount`; returns when, for `give_back`."""
        second = int(now // _SLOT_S) * _SLOT_S
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append([second, 0])
        self._slots[-1][1] += amount
        self._total += amount
        return second

    def give_back(self, amount: int, second: int) -> None:
        """Return `amount` of the charge in `second`, unless that has left the window."""
        for slot in reversed(self._slots):
            if slot[0] == second:
                slot[1] -= amount
                self._total -= amount

    def reset_s(self, now: float) -> float:
        """How long until all is forgotten."""
        return self._slots[-1][0] + _SLOT_S + WINDOW_S - now if self.total(now) else 0.0
