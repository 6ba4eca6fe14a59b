"""The engine replicas of an ingress: which exist, their state, and their attempts.

Used by the transport, failover and the watchdog. Each ingress replica has its own set. The set only
stores state: failover and watchdog decide which replicas are suspect, and the routing policy
chooses the best.
"""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.fleet.attempt import Attempt, Condition, Replica
from serve_app.fleet.load import ReplicaLoad

REVISION = "revision"
"""Key in a replica's metadata: equal for replicas that can continue each other's streams."""
TOKENIZER = "tokenizer"
"""Key in a replica's metadata: equal for replicas that tokenize text in the same way."""


class ReplicaSet:
    """Use it on one event loop; other threads may read. Replica ids are Ray's unique ids."""

    def __init__(self, tokenizer: str | None = None) -> None:
        """`tokenizer`: ignore replicas with another tokenizer, where our token ids differ.

        None: accept all.
        """
        self.waiting: dict[str, Attempt] = {}
        """Attempts not placed on a replica yet, by id."""
        self._tokenizer = tokenizer
        self._replicas: dict[str, Replica] = {}
        self._current: dict[str, dict[str, Any]] = {}
        self._listeners: list[Callable[[], object]] = []

    # ----------------------------------------------------------------------------------------------
    # membership
    def publish(self, replicas: Mapping[str, dict[str, Any]]) -> None:
        """Replace the set. `replicas`: replica id -> result of `record_replica_metadata`."""
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
        """Return the metadata of the replicas that Ray's controller offers, by id.

        Do not modify it.
        """
        return self._current

    def replicas(self) -> list[Replica]:
        """Return these replicas and those that left but are still needed.

        Needed: with attempts, with a reservation, or the only usable ones.
        """
        return list(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        """Return one of `replicas`, None if unknown."""
        return self._replicas.get(replica_id)

    def add_listener(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` after every change of the replicas that may be chosen.

        Also when an attempt leaves a reserved replica. It must not block or change the set. Returns
        a function that removes it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # ----------------------------------------------------------------------------------------------
    # attempts
    def begin(self, attempt: Attempt) -> None:
        """Add an attempt that waits to be placed."""
        self.waiting[attempt.attempt_id] = attempt

    def place(self, attempt: Attempt, replica_id: str) -> None:
        """Move a waiting attempt to this replica."""
        del self.waiting[attempt.attempt_id]
        attempt.replica = replica = self._replicas[replica_id]
        replica.attempts[attempt.attempt_id] = attempt

    def end(self, attempt: Attempt) -> None:
        """Remove an attempt that has ended. Idempotent; `attempt.replica` keeps its value."""
        self.waiting.pop(attempt.attempt_id, None)
        replica = attempt.replica
        if replica is None or replica.attempts.pop(attempt.attempt_id, None) is None:
            return
        self._forget_if_gone(replica)
        if replica.reserved:
            self._notify()

    def attempts(self) -> list[Attempt]:
        """Return all attempts that have begun and not ended."""
        placed = [attempt for replica in self._replicas.values() for attempt in replica.attempts.values()]
        return [*placed, *self.waiting.values()]

    # ----------------------------------------------------------------------------------------------
    # load
    def note_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Store a replica's load."""
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.load = load

    def loads(self) -> dict[str, ReplicaLoad]:
        """Return the last load of every replica that has reported one."""
        return {replica.replica_id: replica.load for replica in self.replicas() if replica.load is not None}

    # ----------------------------------------------------------------------------------------------
    # suspicion
    def suspect(self, replica_id: str, reason: str) -> None:
        """Keep requests away from the replica until `trust`."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.condition is Condition.OK:
            replica.condition, replica.reason = Condition.SUSPECT, reason
            self._forget_if_gone(replica)
            self._notify()

    def trust(self, replica_id: str) -> None:
        """End the suspicion of a replica, after a heartbeat."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.condition is Condition.SUSPECT:
            replica.condition, replica.reason = Condition.OK, ""
            self._notify()

    def reserve(self, replica_id: str) -> None:
        """Reserve the replica: only attempts that have it as `reserved` may use it."""
        self._set_reserved(replica_id, reserved=True)

    def release(self, replica_id: str) -> None:
        """End the reservation."""
        self._set_reserved(replica_id, reserved=False)

    def is_alive(self, replica: Replica) -> bool:
        """Whether the replica could continue what began on it. It may be reserved."""
        return replica in self.alive(replica.revision)

    def alive(self, revision: str | None = None) -> list[Replica]:
        """Return the replicas that could serve a request, of `revision` if given.

        If there are none, returns replicas that are being stopped, in two cases: for a request that
        no other replica can continue, or if the new replicas have another tokenizer. In other
        cases, new requests would prevent a replica from ever stopping, and the replica that waits
        for its GPU from starting.
        """
        usable = [replica for replica in self._replicas.values() if self._is_usable(replica)]
        if revision is not None:
            usable = [replica for replica in usable if replica.revision in (None, revision)]
        present = [replica for replica in usable if replica.present]
        return present or (usable if revision is not None or self._current else [])

    def routable(self, revision: str | None = None) -> list[Replica]:
        """Return the replicas of `alive` that are not reserved."""
        return [replica for replica in self.alive(revision) if not replica.reserved]

    def candidates(self, attempt: Attempt) -> list[Replica]:
        """Return the replicas that the attempt may use: its reserved one, if there is one."""
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
        """Whether the replica is not suspect and has our tokenizer."""
        return replica.condition is Condition.OK and self._tokenizer in (None, replica.metadata.get(TOKENIZER))

    def _forget_if_gone(self, replica: Replica) -> None:
        if not replica.present and not replica.attempts and not replica.reserved and replica not in self.alive():
            self._replicas.pop(replica.replica_id, None)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
