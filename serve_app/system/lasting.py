"""Tasks that run as long as their process: errors are logged and the task restarts after a delay.

Decides when a task counts as failing, which makes the server not ready. Standard library only, so
that every package may import it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
_MOST_DOUBLINGS = 10
_WELL_S = 10.0
"""After this long without an error, a task is healthy again and its delay is reset."""
_FAILING = 3
"""A task is failing after this many errors, without `_WELL_S` of health in between."""
_LOG_PERIOD_S = 60.0


@dataclass(slots=True)
class _State:
    errors: int = 0
    runs_again_at: float = 0.0


class LastingTasks:
    """The lasting tasks of one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`clock` returns seconds. `sleep` waits for that many seconds."""
        self._clock = clock
        self._sleep = sleep
        self._states: dict[str, _State] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Strong references, because the event loop has only weak ones."""
        self._logged: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[str] = Counter()
        """Errors since the start, by task name."""

    def start(self, name: str, work: Callable[[], Awaitable[None]], *, vital: bool = True) -> "asyncio.Task[None]":
        """Create a task that executes `run`."""
        task = asyncio.create_task(self.run(name, work, vital=vital), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, name: str, work: Callable[[], Awaitable[None]], *, vital: bool = True) -> None:
        """Run `work` until it returns or this task is cancelled; restart it after an error.

        `vital`: whether `failing` reports this task. Names of other tasks need not be unique.
        """
        state = _State()
        if vital:
            self._states[name] = state
        try:
            while True:
                began = self._clock()
                try:
                    await work()
                    return
                except (KeyboardInterrupt, SystemExit, GeneratorExit):
                    raise
                except BaseException as error:  # a panic in a Rust library is not an Exception
                    if _is_cancelled(error):
                        raise
                    if self._clock() - began >= _WELL_S:
                        state.errors = 0
                    state.errors += 1
                    delay = min(_FIRST_DELAY_S * 2 ** min(state.errors - 1, _MOST_DOUBLINGS), _LONGEST_DELAY_S)
                    state.runs_again_at = self._clock() + delay
                    self._log(name, error, delay)
                await self._sleep(delay)
        finally:
            if self._states.get(name) is state:
                del self._states[name]

    @property
    def failing(self) -> str | None:
        """Name of a vital task that keeps failing; None if there is none."""
        now = self._clock()
        for name, state in self._states.items():
            if state.errors >= _FAILING and now < state.runs_again_at + _WELL_S:
                return name
        return None

    def _log(self, name: str, error: BaseException, delay_s: float) -> None:
        """Log with a traceback, once a minute for each task and type of error."""
        self.errors[name] += 1
        kind, now = (name, type(error).__name__), self._clock()
        if now - self._logged.get(kind, -_LOG_PERIOD_S) < _LOG_PERIOD_S:
            self._unlogged[kind] += 1
            return
        self._logged[kind] = now
        more = self._unlogged.pop(kind, 0)
        also = f" ({more} more of this kind since the last report)" if more else ""
        logger.error("task %r failed; it restarts in %g s%s", name, delay_s, also, exc_info=error)


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task itself was cancelled, rather than something that it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
