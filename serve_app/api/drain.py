"""Graceful shutdown: refuse new requests, let running ones finish for a while, then end them.

Decides when a request is refused or ended by shutdown, and which error the client gets. The caller
decides when and why to shut down.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from serve_app.errors import RequestTimeoutError, UnavailableError

_RETRY_AFTER_S = 5.0
# Time to send the last event to a client that reads slowly.
_LAST_WORDS_S = 2.0


class Drain:
    """The shutdown state. Not thread-safe: use it on one event loop."""

    def __init__(self) -> None:
        self._requests = 0
        self._limits: set[asyncio.Timeout] = set()
        self._started = False
        self._is_over = False
        self._idle = asyncio.Event()

    def check_open(self) -> None:
        """Raise `UnavailableError` if shutdown has begun."""
        if self._started:
            raise UnavailableError("the server is shutting down", retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request from its arrival to its end. Raises as `check_open` does."""
        self.check_open()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._note_idle()

    @asynccontextmanager
    async def limit(self, deadline: float) -> AsyncIterator[None]:
        """End the block with an error at `deadline` (the event loop's time).

        This includes a block that waits for a client that does not read. Raises
        `RequestTimeoutError` at the deadline, and `UnavailableError` when shutdown ends running
        requests.
        """
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
        """Refuse new requests and wait until none is running.

        Requests that still run after `timeout_s` seconds are ended.
        """
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
