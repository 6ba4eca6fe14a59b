"""The way to the engine replicas: places each attempt on one of them, and takes it there by the replica's link."""

import asyncio
import time
from collections.abc import Callable

from serve_app.core.request import EngineRequest
from serve_app.serving.attempt import ItemStream, LossReason, OnHeartbeat, ReplicaLostError
from serve_app.serving.link import LINK, IngressEnd
from serve_app.serving.replica_set import ReplicaSet
from serve_app.serving.routing import RoutingPolicy, RoutingRequest
from serve_app.serving.wire import WireItem, WireLoad, WireRequest, pack_request

_OPENING_S = 2.0
"""How long a replica has until its first heartbeat. Without one it is taken for lost."""


class LinkTransport:
    """`Transport` over links. For one event loop, the one it is made on.

    Decides when an attempt is placed: at once, on the replica that `policy` ranks first among those that may have it;
    without one, or while all are full, as soon as there is one, the oldest request first. What is placed before the
    replica's link is open waits for that, so that not everything goes to whoever is heard first.
    """

    def __init__(self, replicas: ReplicaSet, policy: RoutingPolicy) -> None:
        self._replicas = replicas
        self._policy = policy
        self._links: dict[str, IngressEnd] = {}
        self._unsent: dict[str, LinkStream] = {}
        self._loop = asyncio.get_running_loop()
        replicas.add_listener(lambda: self._loop.call_soon_threadsafe(self._place_all))

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None, since: float) -> ItemStream:
        """Start an attempt."""
        routing = _routing_request(request, attempt_id, session)
        stream = LinkStream(pack_request(request, attempt_id), routing, since, self._let_go)
        self._unsent[attempt_id] = stream
        self._place_all()
        return stream

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        """Have a link to the replica for as long as it holds. Raises `ReplicaLostError` when it is lost."""
        if (replica := self._replicas.get(replica_id)) is None:
            raise ReplicaLostError(LossReason.LEFT)
        address, key = replica.metadata[LINK]
        host, _, port = address.rpartition(":")

        def heard(load: WireLoad) -> None:
            if replica_id not in self._links and not opening.expired():
                opening.reschedule(None)
                self._links[replica_id] = link
                for stream in self._unsent_to(replica_id):
                    self._send(stream, link)
            on_heartbeat(load)
            if self._unsent:
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
            for stream in self._unsent_to(replica_id):
                self._fail(stream, ReplicaLostError(LossReason.REFUSED))
        raise ReplicaLostError(reason)

    def _unsent_to(self, replica_id: str | None) -> "list[LinkStream]":
        """Those placed on this replica, or on none yet."""
        return [stream for stream in self._unsent.values() if stream.replica_id == replica_id]

    def _place_all(self) -> None:
        is_pinned = self._replicas.is_pinned
        for stream in sorted(self._unsent_to(None), key=lambda s: (not is_pinned(s.attempt.attempt_id), s.since)):
            try:
                placed = self._place(stream)
            except Exception as error:
                self._fail(stream, error)
            else:
                if not placed and not is_pinned(stream.attempt.attempt_id):
                    return  # nor is there room for those behind

    def _place(self, stream: "LinkStream") -> bool:
        """Whether there is a replica for it."""
        attempt = stream.attempt
        allowed = self._replicas.routable(self._replicas.current(), attempt.attempt_id)
        ranked = self._policy.rank(attempt, allowed, self._replicas.loads(), time.monotonic())
        if not ranked:
            return False
        stream.replica_id = chosen = ranked[0]
        self._policy.routed(attempt, chosen)
        self._replicas.note_assigned(attempt.attempt_id, chosen)
        if (link := self._links.get(chosen)) is not None:
            self._send(stream, link)
        return True

    def _send(self, stream: "LinkStream", link: IngressEnd) -> None:
        del self._unsent[stream.attempt.attempt_id]
        stream.start(link)

    def _fail(self, stream: "LinkStream", error: Exception) -> None:
        self._unsent.pop(stream.attempt.attempt_id, None)
        stream.fail(error)

    def _let_go(self, stream: "LinkStream") -> None:
        self._unsent.pop(stream.attempt.attempt_id, None)
        if self._unsent:
            self._loop.call_soon(self._place_all)  # when the policy knows, too, that there is room


class LinkStream:
    """`ItemStream` of one attempt."""

    def __init__(
        self, request: WireRequest, attempt: RoutingRequest, since: float, on_cancel: "Callable[[LinkStream], object]"
    ) -> None:
        """`since`: when its request came."""
        self.attempt = attempt
        self.since = since
        self.replica_id: str | None = None
        """Where it was placed."""
        self._request = request
        self._on_cancel = on_cancel
        self._link: IngressEnd | None = None
        self._items: asyncio.Queue[WireItem | Exception] = asyncio.Queue()

    def start(self, link: IngressEnd) -> None:
        """It goes to the replica of this link."""
        self._link = link
        try:
            link.start(self._request, self._items.put_nowait)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """There will be nothing but `error`."""
        self._items.put_nowait(error)

    async def __anext__(self) -> WireItem:
        """The next item. Raises `ReplicaLostError`."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""
        if self._link is not None:
            self._link.cancel(self.attempt.attempt_id)
        self._on_cancel(self)


def _routing_request(request: EngineRequest, attempt_id: str, session: str | None) -> RoutingRequest:
    prior = max(request.prior_output_ids, key=len, default=())
    return RoutingRequest(
        attempt_id=attempt_id,
        token_ids=(*request.prompt_token_ids, *prior),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_sequences=request.params.n,
        cache_salt=request.cache_salt,
        session=session,
        reads_cache=request.params.prompt_logprobs is None,
    )
