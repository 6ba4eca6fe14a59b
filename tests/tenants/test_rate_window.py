"""What a window of a minute promises, held against the list of everything that was ever charged."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.tenants.rate_window import WINDOW_S, RateWindow

LIMIT = 100
STEP = st.tuples(st.floats(0, 40), st.integers(1, LIMIT), st.floats(0, 1), st.floats(0, 90))
"""Seconds since the last one, amount, the part that is given back, and after how many seconds."""


class Checked:
    """A window whose every charge is also kept here, with its time."""

    def __init__(self) -> None:
        self.window = RateWindow()
        self.charges: list[list[float]] = []
        self.returns: list[tuple[float, int, int, int]] = []

    def within(self, start: float, end: float) -> float:
        return sum(amount for at, amount in self.charges if start < at <= end)

    def give_back_until(self, now: float) -> None:
        for due in sorted(entry for entry in self.returns if entry[0] <= now):
            self.returns.remove(due)
            _, index, amount, second = due
            self.window.total(due[0])
            self.window.give_back(amount, second)
            self.charges[index][1] -= amount


@given(st.lists(STEP, max_size=60))
def test_no_minute_exceeds_its_limit_and_waiting_as_told_helps(steps: list[tuple[float, int, float, float]]) -> None:
    checked, now = Checked(), 0.0
    for gap, amount, part, later in steps:
        now += gap
        checked.give_back_until(now)
        wait = checked.window.wait_s(amount, LIMIT, now)
        assert (wait == 0) == (checked.window.total(now) + amount <= LIMIT)
        assert 0 <= wait <= WINDOW_S + 1
        if wait > 0:
            assert checked.window.total(now + wait * 0.999 - 1e-6) + amount > LIMIT, "no earlier than needed"
            now += wait
            while checked.window.total(now) + amount > LIMIT:
                now += 1e-6  # a sum of floats may fall short of the second's end
        second = checked.window.charge(amount, now)
        checked.charges.append([now, amount])
        checked.returns.append((now + later, len(checked.charges) - 1, int(amount * part), second))
    checked.give_back_until(now)
    for at, _ in checked.charges:
        assert checked.within(at - WINDOW_S, at) <= LIMIT
        assert checked.within(now - WINDOW_S, now) <= checked.window.total(now)


def test_a_limit_that_is_always_used_up_is_used_to_60_of_61() -> None:
    window, now, used = RateWindow(), 0.25, 0
    while now < 600:
        now += window.wait_s(7, LIMIT, now)
        window.charge(7, now)
        used += 7
    assert 0.95 * LIMIT * 60 / 61 <= used / 10 <= LIMIT + 10


def test_what_is_given_back_is_there_at_once_and_what_is_forgotten_is_not_given_back() -> None:
    window = RateWindow()
    second = window.charge(100, 5.5)
    assert (window.wait_s(1, 100, 6.0), window.reset_s(6.0)) == (60.0, 60.0)
    window.give_back(40, second)
    assert (window.wait_s(40, 100, 6.0), window.wait_s(41, 100, 6.0)) == (0.0, 60.0)
    assert (window.total(65.9), window.total(66.0), window.reset_s(66.0)) == (60, 0, 0.0)
    window.give_back(60, second)
    assert window.total(66.0) == 0


def test_a_window_holds_no_more_than_its_seconds() -> None:
    window = RateWindow()
    for tenth in range(10_000):
        window.charge(1, tenth / 10)
        window.total(tenth / 10)
    assert len(window._slots) <= WINDOW_S + 1
