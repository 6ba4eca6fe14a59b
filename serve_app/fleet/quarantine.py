"""Requests of which replicas may die: each of them runs alone until its first tokens.

Such a suspect gets a replica that is closed to everybody else and whose streams move away first. What this costs the
others is bounded: a quarter of the replicas is closed at most (one, where there are fewer than eight) and never the
last, on which suspects take turns beside others; a replica with streams is emptied every `_EMPTYING_PERIOD_S` at most,
while suspects that wait take over those that are closed already; and poison acts on a request's first steps, so tokens
end the suspicion.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_app.fleet.attempt import Replica
from serve_app.fleet.availability import Availability
from serve_app.fleet.loss import LossReason
from serve_app.fleet.replica_set import ReplicaSet

_PARTS = 4
"""One of so many parts of the fleet may be closed."""
_EMPTYING_PERIOD_S = 5.0


class Quarantine:
    """Gives suspects replicas. For one event loop, the one it is made on."""

    def __init__(self, replicas: ReplicaSet, availability: Availability) -> None:
        self._replicas = replicas
        self._availability = availability
        self._loop = asyncio.get_running_loop()
        self._closed: list[Replica] = []
        self._used: list[Replica] = []
        """Those on which a suspect is, or which are being emptied for it."""
        self._num_waiting = 0
        self._may_empty_at = self._loop.time()
        replicas.add_listener(lambda: self._loop.call_soon(self._review))

    @asynccontextmanager
    async def isolation(self, revision: str | None) -> AsyncIterator["Isolation"]:
        """A replica for one suspect. Raises `UnavailableError` when there is none for too long."""
        while True:
            isolation = Isolation(self, await self._take(revision))
            try:
                if await self._emptied(isolation.replica):
                    yield isolation
                    return
            finally:
                isolation.end()

    def give_back(self, replica: Replica) -> None:
        """No suspect needs it: the next one takes it over, or it opens."""
        self._used.remove(replica)
        self._review()
        self._availability.wake()

    async def _take(self, revision: str | None) -> Replica:
        chosen: list[Replica] = []

        def choose() -> bool:
            chosen.extend(self._choice(revision))
            return bool(chosen)

        self._num_waiting += 1
        try:
            await self._availability.until(choose, revision)
            self._used += chosen
        finally:
            self._num_waiting -= 1
            self._review()
        return chosen[0]

    def _choice(self, revision: str | None) -> list[Replica]:
        """The replica that the next suspect gets, closed where it is not the last; empty while there is none."""
        alive = self._replicas.alive(revision)
        taken = [replica for replica in alive if replica in self._closed or replica in self._used]
        if ready := [replica for replica in taken if replica not in self._used]:
            return ready[:1]
        if not alive or len(taken) >= max(1, len(alive) // _PARTS):
            return []
        best = min((replica for replica in alive if replica not in taken), key=lambda replica: len(replica.attempts))
        if len(alive) > 1 and not self._close(best):
            return []
        return [best]

    def _close(self, replica: Replica) -> bool:
        """Keep others away; False if streams would have to move and have had to just now."""
        if replica.attempts:
            now = self._loop.time()
            if now < self._may_empty_at:
                return False
            self._may_empty_at = now + _EMPTYING_PERIOD_S
            self._loop.call_later(_EMPTYING_PERIOD_S, self._availability.wake)
        self._closed.append(replica)
        self._replicas.reserve(replica.replica_id)
        return True

    async def _emptied(self, replica: Replica) -> bool:
        """Wait until the replica has no streams, or is no longer closed; False if it is lost before."""

        def is_over() -> bool:
            if not replica.attempts or replica not in self._closed or not self._replicas.is_alive(replica):
                return True
            for attempt in replica.attempts.values():
                attempt.interrupt(LossReason.QUARANTINE)
            return False

        await self._availability.until(is_over, replica.revision)
        return self._replicas.is_alive(replica)

    def _review(self) -> None:
        """Open what no suspect needs, and what has become the last."""
        spare = [replica for replica in self._closed if replica not in self._used][self._num_waiting :]
        for replica in list(self._closed):
            is_last = not self._replicas.routable(replica.revision)
            if replica in spare or is_last or not self._replicas.is_alive(replica):
                self._closed.remove(replica)
                self._replicas.release(replica.replica_id)


class Isolation:
    """What one suspect has of `replica`."""

    def __init__(self, quarantine: Quarantine, replica: Replica) -> None:
        self.replica = replica
        self._quarantine = quarantine
        self._is_over = False

    def end(self) -> None:
        """It is no suspect any more, or is gone. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._quarantine.give_back(self.replica)
