"""Runs calls to Ray, which may hang or raise any error, with a timeout.

Ray's calls hang when its controller is gone, while the server itself still runs.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_REMINDER_S = 30.0
_LOOK_S = 0.25


class BoundedCalls:
    """Runs calls in a daemon thread, one at a time. Use it from one thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._say = say
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last: Future[object] | None = None
        self._next_report: dict[str, float] = {}
        threading.Thread(target=self._run, daemon=True, name="bounded calls").start()

    def call(self, work: Callable[[], T], timeout_s: float, given_up: Callable[[], bool] = lambda: False) -> T:
        """Run `work` and return its result.

        Raises its error. Raises `TimeoutError` if `work` does not return in time, if `given_up`
        becomes true, or if an earlier call has not returned yet.
        """
        if self._last is not None and not self._last.done():
            raise TimeoutError("Ray has not answered yet")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._last = future  # type: ignore[assignment]
        self._calls.put(run)
        deadline = time.monotonic() + timeout_s
        while not wait([future], _LOOK_S).done:
            if given_up() or time.monotonic() >= deadline:
                raise TimeoutError(f"Ray does not answer within {timeout_s:g} s")
        return future.result()

    def attempt(
        self,
        what: str,
        work: Callable[[], T],
        otherwise: T,
        timeout_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> T:
        """Call `work` like `call`, but on an error print it and return `otherwise`.

        The printed line starts with `what`. Repeats an equal line after 30 s at the earliest.
        Prints nothing if `given_up` is true.
        """
        try:
            return self.call(work, timeout_s, given_up)
        except Exception as error:
            if not given_up():
                self.report(what, error)
            return otherwise

    def report(self, what: str, error: BaseException) -> None:
        """Print an error in one line, unless the same line was printed in the last 30 s."""
        line, now = f"{what}: {first_line(error)}", time.monotonic()
        if now >= self._next_report.get(line, 0.0):
            self._next_report[line] = now + _REMINDER_S
            self._say(line)

    def _run(self) -> None:
        while True:
            self._calls.get()()


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text. Ray's errors contain tracebacks."""
    text = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
