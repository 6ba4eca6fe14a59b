"""Tasks that run as long as their process: what they raise ends none of them, is logged, and turns
readiness off."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from serve_app.system.lasting import LastingTasks


class Time:
    """Goes on while a task sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.delays: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class PanicException(BaseException):
    """As libraries written in Rust raise it."""


def failing_times(count: int, error: Callable[[], BaseException]) -> Callable[[], Awaitable[None]]:
    left = [count]

    async def work() -> None:
        if left[0]:
            left[0] -= 1
            raise error()

    return work


@pytest.mark.parametrize("error", [ValueError, OSError, RecursionError, PanicException, asyncio.CancelledError])
async def test_whatever_is_raised_it_runs_again_with_a_growing_delay(error: type[BaseException]) -> None:
    time = Time()
    tasks = LastingTasks(time.clock, time.sleep)
    await tasks.run("keys", failing_times(7, error))
    assert time.delays == [0.5, 1, 2, 4, 8, 10, 10]
    assert tasks.errors == {"keys": 7}


async def test_a_kind_of_error_is_logged_once_a_minute_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    tasks = LastingTasks(time.clock, time.sleep)
    await tasks.run("keys", failing_times(12, lambda: ValueError("no such day")))
    first, second = caplog.records
    assert (first.levelno, first.exc_info and first.exc_info[0]) == (logging.ERROR, ValueError)
    assert "no such day" in caplog.text
    assert "(9 more of this kind since the last report)" in second.getMessage()


async def test_what_keeps_failing_is_named_until_it_has_run_for_a_while() -> None:
    time = Time()
    tasks = LastingTasks(time.clock, time.sleep)
    seen: list[str | None] = []

    async def work() -> None:
        seen.append(tasks.failing)
        if len(seen) < 4:
            raise ValueError
        assert tasks.failing == "keys"
        time.now += 30
        assert tasks.failing is None

    await tasks.run("keys", work)
    assert seen == [None, None, None, "keys"]


async def test_what_is_not_vital_is_not_named() -> None:
    time = Time()
    tasks = LastingTasks(time.clock, time.sleep)
    named: list[str | None] = []

    async def work() -> None:
        named.append(tasks.failing)
        if len(named) < 9:
            raise ValueError

    await tasks.run("heartbeats", work, vital=False)
    assert set(named) == {None}


async def test_a_task_that_is_cancelled_ends() -> None:
    tasks = LastingTasks()
    for work in (asyncio.Event().wait, failing_times(99, ValueError)):
        task = tasks.start("any", work)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert tasks.failing is None


async def test_a_task_that_fails_for_hours_is_still_run_again() -> None:
    time = Time()
    tasks = LastingTasks(time.clock, time.sleep)
    await tasks.run("keys", failing_times(1_100, ValueError))
    assert time.delays[-1] == 10
