"""Detects failures that attempts cannot: silent replicas, stuck steps, replicas being stopped.

Decides when a replica becomes suspect and which attempts must leave it. Each replica sends
heartbeats over its link, with the number and age of its engine's step: an event loop that runs does
not prove that no kernel is stuck.

Time is counted in ticks of this process's event loop, so that pauses of this process do not count
against the replicas. A false suspicion only costs time: the attempts continue elsewhere, and the
next heartbeat ends it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from serve_app.fleet.attempt import Attempt, Condition, Replica, Transport
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.wire import WireLoad, unpack_load
from serve_app.system.lasting import LastingTasks

logger = logging.getLogger(__name__)

TICK_S = 0.5
SILENCE_S = 5.0
"""A replica silent for this long is stalled.

An attempt without any usable replica for this long is lost as `UNROUTED`.
"""
_LEAVING_S = 1.0
"""Ray removes a replica from its set for a moment when its configuration changes."""


class Watchdog:
    """Watches `replicas` and their attempts. Call `run` in its own task on their event loop."""

    def __init__(
        self,
        transport: Transport,
        replicas: ReplicaSet,
        *,
        tasks: LastingTasks | None = None,
        on_false_alarm: Callable[[], None] = lambda: None,
    ) -> None:
        """`tasks` runs lasting tasks. `on_false_alarm`: called when a stalled replica recovers."""
        self._tasks = tasks or LastingTasks()
        self._transport = transport
        self._replicas = replicas
        self._on_false_alarm = on_false_alarm
        self._listeners: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Tick until cancelled."""
        loop = asyncio.get_running_loop()
        remove_listener = self._replicas.add_listener(lambda: loop.call_soon(self._listen_to_all))
        try:
            self._listen_to_all()
            while True:
                await asyncio.sleep(TICK_S)
                self.tick()
        finally:
            remove_listener()
            listeners = [*self._listeners.values()]
            self._listeners.clear()
            for task in listeners:
                task.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    def tick(self) -> None:
        """Check every replica and every attempt once."""
        for replica in self._replicas.replicas():
            self._judge(replica)
        self._check_attempts()
        self._listen_to_all()

    def _listen_to_all(self) -> None:
        replicas = self._replicas.replicas()
        # Do not retry an incompatible replica: the result would be the same.
        present = {r.replica_id for r in replicas if r.present and r.reason != LossReason.INCOMPATIBLE}
        # Listen to a replica that has left until its last attempt ends: its outputs use the same
        # link.
        known = {replica.replica_id for replica in replicas}
        for replica_id in present - self._listeners.keys():
            # Not vital: the other replicas continue to serve.
            listen = partial(self._listen, replica_id)
            self._listeners[replica_id] = self._tasks.start("heartbeats", listen, vital=False)
        for replica_id in self._listeners.keys() - known:
            self._listeners.pop(replica_id).cancel()

    def _judge(self, replica: Replica) -> None:
        replica.silent_ticks += 1
        replica.absent_ticks = 0 if replica.present else replica.absent_ticks + 1
        # If a replica hangs while it is being stopped, Ray ends it.
        silent = replica.present and replica.has_beaten and replica.silent_ticks * TICK_S > SILENCE_S
        if replica.condition is Condition.OK and (silent or self._is_stuck(replica)):
            logger.warning(
                "replica %s stalled (%s); its requests move to other replicas",
                replica.replica_id,
                f"silent for {SILENCE_S:g} s" if silent else f"no step for {replica.stall_timeout_s:g} s",
            )
            self._replicas.suspect(replica.replica_id, LossReason.STALLED)

    def _is_stuck(self, replica: Replica) -> bool:
        age = None if replica.load is None else replica.load.step_age_s
        return age is not None and age > replica.stall_timeout_s

    def _check_attempts(self) -> None:
        for attempt in self._replicas.attempts():
            if (reason := self._reason_to_leave(attempt)) is not None:
                attempt.interrupt(reason)

    def _reason_to_leave(self, attempt: Attempt) -> LossReason | None:
        """Return why the attempt must leave its replica or its wait; None if it may stay."""
        replica = attempt.replica
        if replica is None:
            # While the possible replicas are only full, the attempt waits for room.
            possible = self._replicas.candidates(attempt)
            attempt.unrouted_ticks = 0 if possible else attempt.unrouted_ticks + 1
            return LossReason.UNROUTED if attempt.unrouted_ticks * TICK_S > SILENCE_S else None
        if replica.condition is not Condition.OK:
            return LossReason(replica.reason)
        if replica.absent_ticks * TICK_S >= _LEAVING_S:
            return LossReason.LEFT if self._has_other(replica) else None
        if replica.reserved and attempt.reserved is not replica:
            return LossReason.QUARANTINE if self._has_other(replica) else None
        return None

    def _has_other(self, replica: Replica) -> bool:
        """Whether another replica can continue this one's attempts.

        A replica counts only after its first heartbeat, as it may never send one.
        """
        return any(other.present and other.has_beaten for other in self._replicas.routable(replica.revision))

    async def _listen(self, replica_id: str) -> None:
        """Keep a link to the replica until cancelled or the replica is incompatible."""
        while True:
            try:
                await self._transport.listen(replica_id, partial(self._heard, replica_id))
            except ReplicaLostError as loss:
                if loss.reason.is_suspicious:
                    self._replicas.suspect(replica_id, loss.reason)
                    self._check_attempts()
                if loss.reason is LossReason.INCOMPATIBLE:
                    self._listeners.pop(replica_id, None)
                    return
            await asyncio.sleep(TICK_S)

    def _heard(self, replica_id: str, load: WireLoad) -> None:
        self._replicas.note_load(replica_id, unpack_load(load, time.monotonic()))
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        replica.has_beaten, replica.silent_ticks = True, 0
        if not self._is_stuck(replica):
            if replica.reason == LossReason.STALLED:
                self._on_false_alarm()
            self._replicas.trust(replica_id)
