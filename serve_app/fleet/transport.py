"""Transport to the engine replicas: places each attempt on a replica and sends it over its link."""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

from serve_app.fleet.attempt import Attempt, Replica
from serve_app.fleet.link import LINK, IngressEnd, OnHeartbeat
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.routing_policy import ReplicaInfo, RoutingPolicy
from serve_app.fleet.wire import WireItem, WireLoad, pack_request

logger = logging.getLogger(__name__)

_OPENING_S = 2.0
"""A replica without a heartbeat this long after connecting counts as lost."""


class LinkTransport:
    """`Transport` over links. Not thread-safe: use it on the event loop that created it.

    An attempt is placed at once on the allowed replica that `policy` ranks first. If there is none,
    or all are full, it waits; the oldest request is placed first. A waiting attempt blocks only
    those that could use the same replicas. An attempt may be placed on a replica whose link is not
    open yet, and is sent when the link opens. Otherwise all attempts would go to the replica whose
    link opens first.
    """

    def __init__(self, replicas: ReplicaSet, policy: RoutingPolicy) -> None:
        self._replicas = replicas
        self._policy = policy
        self._links: dict[str, IngressEnd] = {}
        self._loop = asyncio.get_running_loop()
        self._replicas_changed()
        replicas.add_listener(lambda: self._loop.call_soon(self._replicas_changed))

    def start(self, attempt: Attempt) -> None:
        """Place the attempt once a replica has room."""
        self._replicas.begin(attempt)
        self._place_all()

    def stop(self, attempt: Attempt) -> None:
        """Release the attempt, so that another one can take its slot."""
        if attempt.replica is not None and (link := self._links.get(attempt.replica.replica_id)) is not None:
            link.cancel(attempt.attempt_id)
        self._replicas.end(attempt)
        if attempt.placement is not None:
            attempt.placement.ended()
        if self._replicas.waiting:
            self._loop.call_soon(self._place_all)

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        """Keep a link to the replica until it is lost; then raise `ReplicaLostError`."""
        if (replica := self._replicas.get(replica_id)) is None:
            raise ReplicaLostError(LossReason.LEFT)
        try:
            address, key = replica.metadata[LINK]
            host, _, port = address.rpartition(":")
            ReplicaInfo.from_metadata(replica.metadata)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.error("replica %s has malformed metadata (%r) and gets no requests", replica_id, error)
            raise ReplicaLostError(LossReason.INCOMPATIBLE) from error

        def heard(load: WireLoad) -> None:
            if replica_id not in self._links and not opening.expired():
                opening.reschedule(None)
                self._links[replica_id] = link
                for attempt in _unsent(replica):
                    self._send(attempt, link)
            on_heartbeat(load)
            if self._replicas.waiting:
                self._place_all()

        link = IngressEnd(key, heard)
        reason = LossReason.UNAVAILABLE
        try:
            async with asyncio.timeout(_OPENING_S) as opening:
                await self._loop.create_connection(lambda: link, host, int(port))
                reason = await link.lost
        except OSError:
            pass
        finally:
            self._links.pop(replica_id, None)
            link.close()
            for attempt in _unsent(replica):
                self._fail(attempt, ReplicaLostError(LossReason.REFUSED))
        raise ReplicaLostError(reason)

    def account(self, replica_id: str) -> dict[str, float | None]:
        """Return the routing policy's record of this replica, for operators."""
        return self._policy.account(replica_id)

    def _replicas_changed(self) -> None:
        infos = {}
        for replica in self._replicas.replicas():
            # `listen` reports replicas with malformed metadata.
            with suppress(KeyError, TypeError):
                infos[replica.replica_id] = ReplicaInfo.from_metadata(replica.metadata)
        self._policy.update(infos)
        self._place_all()

    def _place_all(self) -> None:
        possible: dict[tuple[str | None, Replica | None], list[str]] = {}
        wanted: set[str] = set()  # reserved for older waiting attempts
        for attempt in sorted(self._replicas.waiting.values(), key=lambda a: (a.reserved is None, a.since)):
            kind = attempt.revision, attempt.reserved
            if kind not in possible:
                possible[kind] = [replica.replica_id for replica in self._replicas.candidates(attempt)]
            allowed = [name for name in possible[kind] if name not in wanted]
            try:
                if allowed and not self._place(attempt, allowed):
                    wanted.update(allowed)
            except Exception as error:
                self._fail(attempt, error)

    def _place(self, attempt: Attempt, allowed: list[str]) -> bool:
        """Place the attempt if one of the `allowed` replicas has room. Returns whether it did."""
        ranked = self._policy.rank(attempt.routing, allowed, self._replicas.loads(), time.monotonic())
        if not ranked:
            return False
        chosen = ranked[0]
        attempt.placement = self._policy.place(attempt.routing, chosen)
        self._replicas.place(attempt, chosen)
        if (link := self._links.get(chosen)) is not None:
            self._send(attempt, link)
        return True

    def _send(self, attempt: Attempt, link: IngressEnd) -> None:
        attempt.is_sent = True
        try:
            link.start(pack_request(attempt.request, attempt.attempt_id), partial(self._receive, attempt))
        except Exception as error:
            attempt.receive(error)

    def _receive(self, attempt: Attempt, item: WireItem | ReplicaLostError) -> None:
        if not attempt.receive(item):
            self.stop(attempt)

    def _fail(self, attempt: Attempt, error: Exception) -> None:
        self._replicas.end(attempt)
        attempt.receive(error)


def _unsent(replica: Replica) -> list[Attempt]:
    """Return the attempts placed on `replica` that wait for its link."""
    return [attempt for attempt in replica.attempts.values() if not attempt.is_sent]
