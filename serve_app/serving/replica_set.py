"""What this process knows of the engine replicas: who is there, how they are, which attempts they have.

One `ReplicaSet` per ingress process, shared by Ray's router (which may run in a thread of its own), the transport, the
failover and the watchdog; with several ingress replicas each has its own, and none knows of the others'. The set
remembers and answers; it decides neither who is suspected (failover and watchdog do) nor who is the best choice (the
routing policy does).
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How full a replica was at `at` (monotonic seconds of this process).

    `step` is the number of the engine's last finished step; `step_age_s` how long the current one has been going on,
    None when there is nothing to run.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    step: int
    step_age_s: float | None
    at: float


class Condition(StrEnum):
    """SUSPECT: it failed a request or fell silent; a heartbeat makes it OK again."""

    OK = "ok"
    SUSPECT = "suspect"


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. Counters of ticks are the watchdog's."""

    replica_id: str
    metadata: dict[str, Any]
    present: bool = True
    """Whether Ray's controller lets requests go to it; a replica that is being stopped is not."""
    condition: Condition = Condition.OK
    reason: str = ""
    """Why it is not OK."""
    load: ReplicaLoad | None = None
    attempts: set[str] = field(default_factory=set)
    reserved: bool = False
    has_beaten: bool = False
    silent_ticks: int = 0
    absent_ticks: int = 0


class ReplicaSet:
    """Thread-safe. Replica ids are Ray's unique ids; an attempt is one try of one request at one replica."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._replicas: dict[str, Replica] = {}
        self._current: dict[str, dict[str, Any]] = {}
        self._assigned: dict[str, Replica | None] = {}
        self._pinned: dict[str, str] = {}
        self._revision: str | None = None
        self._listeners: list[Callable[[], object]] = []

    # ---------------------------------------------------------------------------------------------- who is there
    def publish(self, replicas: Mapping[str, dict[str, Any]]) -> None:
        """Replace the set: replica id -> what its `record_replica_metadata` said."""
        with self._lock:
            self._current = dict(replicas)
            for replica_id, metadata in replicas.items():
                replica = self._replicas.setdefault(replica_id, Replica(replica_id, metadata))
                replica.metadata, replica.present, replica.absent_ticks = metadata, True, 0
            for replica in list(self._replicas.values()):
                replica.present = replica.replica_id in replicas
                self._forget_if_gone(replica)
        self._notify()

    def current(self) -> dict[str, dict[str, Any]]:
        """Replica id -> metadata of the replicas that Ray's controller offers. Do not change it."""
        return self._current

    def replicas(self) -> list[Replica]:
        """Those, and the ones that left but still have attempts."""
        with self._lock:
            return list(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        """One of `replicas`."""
        return self._replicas.get(replica_id)

    def require(self, revision: str) -> None:
        """Leave out replicas of any other revision from now on: their tokens would not continue ours."""
        self._revision = revision

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Call `listener` after every change of who may be chosen (and when an attempt leaves a reserved replica).

        It is called in whichever thread made the change and must not block.
        """
        self._listeners.append(listener)

    # ---------------------------------------------------------------------------------------------- attempts
    def begin(self, attempt_id: str) -> None:
        """An attempt is about to be routed."""
        with self._lock:
            self._assigned[attempt_id] = None

    def pin(self, attempt_id: str, replica_id: str) -> None:
        """The attempt may go to this replica only. `end` forgets that."""
        with self._lock:
            self._pinned[attempt_id] = replica_id

    def note_assigned(self, attempt_id: str, replica_id: str) -> None:
        """The attempt goes to this replica now. Attempts that are over, or never began, are ignored."""
        with self._lock:
            if attempt_id not in self._assigned:
                return
            replica = self._assigned[attempt_id] = self._replicas.get(replica_id)
            if replica is not None:
                replica.attempts.add(attempt_id)

    def end(self, attempt_id: str) -> None:
        """The attempt is over. Idempotent."""
        with self._lock:
            self._pinned.pop(attempt_id, None)
            replica = self._assigned.pop(attempt_id, None)
            if replica is None:
                return
            replica.attempts.discard(attempt_id)
            self._forget_if_gone(replica)
            if not replica.reserved:
                return
        self._notify()

    def replica_of(self, attempt_id: str) -> Replica | None:
        """Where the attempt was sent; None while it is not routed."""
        return self._assigned.get(attempt_id)

    def is_pinned(self, attempt_id: str) -> bool:
        """Whether the attempt may go to one replica only."""
        return attempt_id in self._pinned

    def in_flight(self, replica_id: str) -> int:
        """Attempts of this process on the replica, now."""
        replica = self._replicas.get(replica_id)
        return len(replica.attempts) if replica is not None else 0

    # ---------------------------------------------------------------------------------------------- load
    def note_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """A replica's load; older than what is known it is ignored."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is not None and (replica.load is None or replica.load.at <= load.at):
                replica.load = load

    def loads(self) -> dict[str, ReplicaLoad]:
        """The last known load of every replica that has told one."""
        with self._lock:
            return {name: replica.load for name, replica in self._replicas.items() if replica.load is not None}

    # ---------------------------------------------------------------------------------------------- who may be chosen
    def suspect(self, replica_id: str, reason: str) -> None:
        """Keep requests away from the replica until `trust`."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or replica.condition is Condition.SUSPECT:
                return
            replica.condition, replica.reason = Condition.SUSPECT, reason
        self._notify()

    def trust(self, replica_id: str) -> None:
        """The replica gave a sign of life: if it was suspected, it no longer is."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or replica.condition is not Condition.SUSPECT:
                return
            replica.condition, replica.reason = Condition.OK, ""
        self._notify()

    def reserve(self, replica_id: str) -> None:
        """From now on only attempts that are pinned to the replica go there."""
        self._set_reserved(replica_id, reserved=True)

    def release(self, replica_id: str) -> None:
        """End the reservation."""
        self._set_reserved(replica_id, reserved=False)

    def is_alive(self, replica_id: str) -> bool:
        """Whether the replica could serve: there, not suspected, of our revision; it may be reserved."""
        replica = self._replicas.get(replica_id)
        return replica is not None and self._is_alive(replica)

    def is_routable(self, replica_id: str) -> bool:
        """Whether any request may go to the replica."""
        replica = self._replicas.get(replica_id)
        return replica is not None and self._is_alive(replica) and not replica.reserved

    def alive(self) -> list[str]:
        """The ids for which `is_alive` holds."""
        return [replica_id for replica_id in self._current if self.is_alive(replica_id)]

    def any_routable(self) -> bool:
        """Whether there is a replica to which any request may go."""
        return any(self.is_routable(replica_id) for replica_id in self._current)

    def routable(self, candidates: Iterable[str], attempt_id: str | None = None) -> list[str]:
        """Those of `candidates` that the attempt may go to, in their order; only its own if it is pinned."""
        pinned = self._pinned.get(attempt_id) if attempt_id is not None else None
        if pinned is not None:
            return [replica_id for replica_id in candidates if replica_id == pinned]
        return [replica_id for replica_id in candidates if self.is_routable(replica_id)]

    # ----------------------------------------------------------------------------------------------
    def _is_alive(self, replica: Replica) -> bool:
        ours = self._revision is None or replica.metadata.get("revision", self._revision) == self._revision
        return replica.present and replica.condition is Condition.OK and ours

    def _set_reserved(self, replica_id: str, *, reserved: bool) -> None:
        with self._lock:
            if (replica := self._replicas.get(replica_id)) is not None:
                replica.reserved = reserved
        self._notify()

    def _forget_if_gone(self, replica: Replica) -> None:
        if not replica.present and not replica.attempts:
            self._replicas.pop(replica.replica_id, None)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()


process_set = ReplicaSet()
"""This process's one. Reach it through the module: Ray copies the router by value, and what it imported by name too."""
