"""Calls that hang or fail: said once in a line, and nothing waits for them longer than it must."""

import threading

import pytest

from serve_app.launch.bounded import BoundedCalls


def test_what_it_returns_and_raises() -> None:
    calls = BoundedCalls(print)
    assert calls.call(lambda: 5, 30) == 5
    with pytest.raises(RecursionError):
        calls.call(lambda: (_ for _ in ()).throw(RecursionError), 30)
    assert calls.call(lambda: 6, 30) == 6


def test_what_hangs_is_waited_for_no_longer_and_hinders_no_later_call_for_good() -> None:
    said: list[str] = []
    calls, may_end, ended = BoundedCalls(said.append), threading.Event(), threading.Event()

    def hang() -> None:
        may_end.wait()
        ended.set()

    for _ in range(3):
        assert calls.attempt("the update", lambda: hang() or 1, 2, 0.0) == 2  # type: ignore[func-returns-value]
    assert said == [
        "the update: TimeoutError: Ray does not answer within 0 s",
        "the update: TimeoutError: Ray has not answered yet",
    ]
    with pytest.raises(TimeoutError):
        calls.call(lambda: 1, 600, given_up=lambda: True)
    may_end.set()
    assert ended.wait(30)
    while True:
        try:
            assert calls.call(lambda: 7, 30) == 7
            break
        except TimeoutError:  # the thread is on its way back
            continue


def test_a_failure_is_one_line() -> None:
    said: list[str] = []

    def fail() -> int:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "first\nsecond")

    assert BoundedCalls(said.append).attempt("the update", fail, 3, 30) == 3
    (line,) = said
    assert line.startswith("the update: UnicodeDecodeError: ")
    assert "second" not in line
