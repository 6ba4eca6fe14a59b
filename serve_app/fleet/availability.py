"""Whether there are replicas, and waiting until they are as a request needs them. Not for ever: Ray replaces what died.

Who is there is `ReplicaSet`'s knowledge; here is the time since when nobody is.
"""

import asyncio
from collections.abc import Callable

from serve_app.errors import UnavailableError
from serve_app.fleet.replica_set import ReplicaSet

RETRY_AFTER_S = 2.0


class Availability:
    """For one event loop, the one it is made on."""

    def __init__(self, replicas: ReplicaSet, wait_s: float) -> None:
        """Without replicas requests wait for `wait_s`."""
        self.wait_s = wait_s
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._none_since: float | None = self._loop.time()
        self.wake()
        replicas.add_listener(lambda: self._loop.call_soon(self.wake))

    @property
    def without_replicas_s(self) -> float:
        """For how many seconds no replica has been there; 0 while one is."""
        return 0.0 if self._none_since is None else self._loop.time() - self._none_since

    async def until(self, condition: Callable[[], bool], revision: str | None) -> None:
        """Wait until the replicas meet `condition`; raises `UnavailableError` when there was none for `wait_s`.

        `condition` is asked after every change of who may be chosen, and when somebody calls `wake`.
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

    def wake_in(self, seconds: float) -> None:
        """`wake`, later."""
        self._loop.call_later(seconds, self.wake)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        if self._replicas.alive():
            self._none_since = None
        elif self._none_since is None:
            self._none_since = self._loop.time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
