"""The way from serving to stopped: nothing new is taken, what runs may end by itself for a while, then it is ended.

Decides when a request is refused or ended because the server stops, and how the client reads it. Who stops the server,
and why, is the caller's.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from serve_app.errors import RequestTimeoutError, UnavailableError

_RETRY_AFTER_S = 5.0
# For the last event on its way to a client that hardly reads.
_LAST_WORDS_S = 2.0


class Drain:
    """For one event loop."""

    def __init__(self) -> None:
        self._requests = 0
        self._limits: set[asyncio.Timeout] = set()
        self._started = False
        self._is_over = False
        self._idle = asyncio.Event()

    def check_open(self) -> None:
        """Raise `UnavailableError` once the server takes nothing new."""
        if self._started:
            raise UnavailableError("the server is shutting down", retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its arrival to its end. Raises `UnavailableError` as `check_open` does."""
        self.check_open()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._note_idle()

    @asynccontextmanager
    async def limit(self, deadline: float) -> AsyncIterator[None]:
        """Whatever is awaited in here, a client that does not read included, ends at `deadline` (the event loop's
        time) with `RequestTimeoutError`, and with `UnavailableError` when the time for running requests is over."""
        limit = asyncio.timeout_at(-math.inf if self._is_over else deadline)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            if self._is_over:
                raise UnavailableError("the server has shut down", retry_after_s=_RETRY_AFTER_S) from None
            raise RequestTimeoutError("the request did not finish before its deadline") from None

    async def run(self, timeout_s: float) -> None:
        """Take nothing new; return once nothing runs. What still runs after `timeout_s` seconds is ended."""
        self._started = True
        self._note_idle()
        if await self._is_idle_within(timeout_s):
            return
        self._is_over = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)
        await self._is_idle_within(_LAST_WORDS_S)

    def _note_idle(self) -> None:
        if self._started and not self._requests:
            self._idle.set()

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
