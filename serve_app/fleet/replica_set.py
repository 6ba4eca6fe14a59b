"""What an ingress knows of the engine replicas: who is there, how they are, which attempts they have.

Shared by the transport, failover and the watchdog; with several ingress replicas each has its own, and none knows of
the others'. The set remembers and answers; it decides neither who is suspected (failover and watchdog do) nor who is
the best choice (the routing policy does).
"""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.fleet.attempt import Attempt, Condition, Replica
from serve_app.fleet.load import ReplicaLoad

REVISION = "revision"
"""In a replica's metadata: equal where one may continue the other's streams."""
TOKENIZER = "tokenizer"
"""In a replica's metadata: equal where the same text is the same tokens to both."""


class ReplicaSet:
    """For one event loop; other threads may read. Replica ids are Ray's unique ids."""

    def __init__(self, tokenizer: str | None = None) -> None:
        """Replicas of another `tokenizer` are left out: our token ids mean something else there. None = any will do."""
        self.waiting: dict[str, Attempt] = {}
        """Attempts that no replica has yet, by their ids."""
        self._tokenizer = tokenizer
        self._replicas: dict[str, Replica] = {}
        self._current: dict[str, dict[str, Any]] = {}
        self._listeners: list[Callable[[], object]] = []

    # ---------------------------------------------------------------------------------------------- who is there
    def publish(self, replicas: Mapping[str, dict[str, Any]]) -> None:
        """Replace the set: replica id -> what its `record_replica_metadata` said."""
        self._current = dict(replicas)
        for replica_id, metadata in replicas.items():
            replica = self._replicas.setdefault(replica_id, Replica(replica_id, metadata))
            replica.metadata, replica.present, replica.absent_ticks = metadata, True, 0
        for replica in self._replicas.values():
            replica.present = replica.replica_id in replicas
        for replica in list(self._replicas.values()):
            self._forget_if_gone(replica)
        self._notify()

    def current(self) -> dict[str, dict[str, Any]]:
        """Replica id -> metadata of the replicas that Ray's controller offers. Do not change it."""
        return self._current

    def replicas(self) -> list[Replica]:
        """Those, and the ones that left but still have attempts or a reservation, or are all that we can use."""
        return list(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        """One of `replicas`."""
        return self._replicas.get(replica_id)

    def add_listener(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` after every change of who may be chosen (and when an attempt leaves a reserved replica).

        It must not block, nor change the set. Returns a function that removes it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # ---------------------------------------------------------------------------------------------- attempts
    def begin(self, attempt: Attempt) -> None:
        """The attempt waits for a place."""
        self.waiting[attempt.attempt_id] = attempt

    def place(self, attempt: Attempt, replica_id: str) -> None:
        """The waiting attempt goes to this replica."""
        del self.waiting[attempt.attempt_id]
        attempt.replica = replica = self._replicas[replica_id]
        replica.attempts[attempt.attempt_id] = attempt

    def end(self, attempt: Attempt) -> None:
        """The attempt is over. Idempotent; `attempt.replica` stays."""
        self.waiting.pop(attempt.attempt_id, None)
        replica = attempt.replica
        if replica is None or replica.attempts.pop(attempt.attempt_id, None) is None:
            return
        self._forget_if_gone(replica)
        if replica.reserved:
            self._notify()

    def attempts(self) -> list[Attempt]:
        """All that have begun and are not over."""
        placed = [attempt for replica in self._replicas.values() for attempt in replica.attempts.values()]
        return [*placed, *self.waiting.values()]

    # ---------------------------------------------------------------------------------------------- load
    def note_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """A replica's load."""
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.load = load

    def loads(self) -> dict[str, ReplicaLoad]:
        """The last known load of every replica that has reported one."""
        return {replica.replica_id: replica.load for replica in self.replicas() if replica.load is not None}

    # ---------------------------------------------------------------------------------------------- who may be chosen
    def suspect(self, replica_id: str, reason: str) -> None:
        """Keep requests away from the replica until `trust`."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.condition is Condition.OK:
            replica.condition, replica.reason = Condition.SUSPECT, reason
            self._forget_if_gone(replica)
            self._notify()

    def trust(self, replica_id: str) -> None:
        """The replica gave a sign of life: if it was suspected, it no longer is."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.condition is Condition.SUSPECT:
            replica.condition, replica.reason = Condition.OK, ""
            self._notify()

    def reserve(self, replica_id: str) -> None:
        """From now on only an attempt that has the replica `reserved` goes there."""
        self._set_reserved(replica_id, reserved=True)

    def release(self, replica_id: str) -> None:
        """End the reservation."""
        self._set_reserved(replica_id, reserved=False)

    def is_alive(self, replica: Replica) -> bool:
        """Whether the replica is one of those that could serve what began on it; it may be reserved."""
        return replica in self.alive(replica.revision)

    def alive(self, revision: str | None = None) -> list[Replica]:
        """The replicas that could serve a request: of `revision`, if that is given.

        Where there is none, those that are being stopped: for a request that no others can continue, or if those that
        came in their place have another tokenizer. Otherwise new requests would keep a replica from ever stopping, and
        the one that waits for its GPU from starting.
        """
        usable = [replica for replica in self._replicas.values() if self._is_usable(replica)]
        if revision is not None:
            usable = [replica for replica in usable if replica.revision in (None, revision)]
        present = [replica for replica in usable if replica.present]
        return present or (usable if revision is not None or self._current else [])

    def routable(self, revision: str | None = None) -> list[Replica]:
        """Those of `alive` that are not reserved."""
        return [replica for replica in self.alive(revision) if not replica.reserved]

    def candidates(self, attempt: Attempt) -> list[Replica]:
        """The replicas that the attempt may go to; only its own if it has one reserved."""
        if attempt.reserved is None:
            return self.routable(attempt.revision)
        return [attempt.reserved] if attempt.reserved.present or self.is_alive(attempt.reserved) else []

    # ----------------------------------------------------------------------------------------------
    def _set_reserved(self, replica_id: str, *, reserved: bool) -> None:
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.reserved = reserved
            self._forget_if_gone(replica)
        self._notify()

    def _is_usable(self, replica: Replica) -> bool:
        """Not suspected, with our tokenizer."""
        return replica.condition is Condition.OK and self._tokenizer in (None, replica.metadata.get(TOKENIZER))

    def _forget_if_gone(self, replica: Replica) -> None:
        if not replica.present and not replica.attempts and not replica.reserved and replica not in self.alive():
            self._replicas.pop(replica.replica_id, None)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
