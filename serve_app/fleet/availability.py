"""Waits until replicas are available as a request needs them, for a limited time.

The time is limited because Ray replaces replicas that died. `ReplicaSet` knows the replicas; this
module tracks since when there has been none.
"""

import asyncio
from collections.abc import Callable

from serve_app.errors import UnavailableError
from serve_app.fleet.replica_set import ReplicaSet

RETRY_AFTER_S = 2.0


class Availability:
    """Not thread-safe: use it on the event loop that created it."""

    def __init__(self, replicas: ReplicaSet, wait_s: float) -> None:
        """`wait_s`: how long requests wait while there is no replica."""
        self.wait_s = wait_s
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._none_since: float | None = self._loop.time()
        self.wake()
        replicas.add_listener(lambda: self._loop.call_soon(self.wake))

    @property
    def without_replicas_s(self) -> float:
        """Seconds since there was a replica; 0 if there is one."""
        return 0.0 if self._none_since is None else self._loop.time() - self._none_since

    async def until(self, condition: Callable[[], bool], revision: str | None) -> None:
        """Wait until `condition` is true.

        Raises `UnavailableError` after `wait_s` without a replica. `condition` is evaluated after
        every change of the replicas that may be chosen, and on `wake`.
        """
        asked_at = self._loop.time()
        while not condition():
            none_since = self._none_since
            if none_since is None and not self._replicas.alive(revision):
                none_since = asked_at
            try:
                async with asyncio.timeout_at(None if none_since is None else none_since + self.wait_s):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError("no engine replica is running", retry_after_s=RETRY_AFTER_S) from None

    def wake(self) -> None:
        """Make all waiters evaluate their conditions again."""
        if self._replicas.alive():
            self._none_since = None
        elif self._none_since is None:
            self._none_since = self._loop.time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
