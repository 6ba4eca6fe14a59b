"""Quarantine: a request that may kill replicas ("suspect") runs alone until its first tokens.

A suspect gets a replica that is closed to others and whose streams move away first. The cost for
other requests is bounded:

- At most a quarter of the replicas is closed (one if there are fewer than eight), and never the
  last one. There, suspects run one at a time, with other requests.
- At most one replica with streams is emptied per `_EMPTYING_PERIOD_S`. Waiting suspects use
  replicas that are already closed.
- Poison acts on a request's first steps, so tokens end the suspicion.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_app.fleet.attempt import Replica
from serve_app.fleet.availability import Availability
from serve_app.fleet.loss import LossReason
from serve_app.fleet.replica_set import ReplicaSet

_PARTS = 4
"""At most one replica in this many may be closed."""
_EMPTYING_PERIOD_S = 5.0


class Quarantine:
    """Assigns replicas to suspects. Not thread-safe: use it on the event loop that created it."""

    def __init__(self, replicas: ReplicaSet, availability: Availability) -> None:
        self._replicas = replicas
        self._availability = availability
        self._loop = asyncio.get_running_loop()
        self._closed: list[Replica] = []
        self._used: list[Replica] = []
        """Replicas that run a suspect, or are being emptied for one."""
        self._num_waiting = 0
        self._may_empty_at = self._loop.time()
        replicas.add_listener(lambda: self._loop.call_soon(self._review))

    @asynccontextmanager
    async def isolation(self, revision: str | None) -> AsyncIterator["Isolation"]:
        """Provide a replica for one suspect.

        Raises `UnavailableError` if there is none for too long.
        """
        while True:
            isolation = Isolation(self, await self._take(revision))
            try:
                if await self._emptied(isolation.replica):
                    yield isolation
                    return
            finally:
                isolation.end()

    def give_back(self, replica: Replica) -> None:
        """Pass the replica on to the next suspect, or open it."""
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
        """Return the next suspect's replica, closed unless it is the last. May be empty."""
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
        """Close the replica to other requests.

        Returns False if its streams would have to move too soon after the last such move.
        """
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
        """Wait until the replica has no streams or is open. Returns False if it is lost first."""

        def is_over() -> bool:
            if not replica.attempts or replica not in self._closed or not self._replicas.is_alive(replica):
                return True
            for attempt in replica.attempts.values():
                attempt.interrupt(LossReason.QUARANTINE)
            return False

        await self._availability.until(is_over, replica.revision)
        return self._replicas.is_alive(replica)

    def _review(self) -> None:
        """Open the replicas that no suspect needs, and the last one left."""
        spare = [replica for replica in self._closed if replica not in self._used][self._num_waiting :]
        for replica in list(self._closed):
            is_last = not self._replicas.routable(replica.revision)
            if replica in spare or is_last or not self._replicas.is_alive(replica):
                self._closed.remove(replica)
                self._replicas.release(replica.replica_id)


class Isolation:
    """The use of `replica` by one suspect."""

    def __init__(self, quarantine: Quarantine, replica: Replica) -> None:
        self.replica = replica
        self._quarantine = quarantine
        self._is_over = False

    def end(self) -> None:
        """End the isolation: the request is no longer suspect, or has ended. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._quarantine.give_back(self.replica)
