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
    without one, as soon as there is one. What is placed before the replica's link is open waits for that, so that not
    everything goes to whoever is heard first.
    """

    def __init__(self, replicas: ReplicaSet, policy: RoutingPolicy) -> None:
        self._replicas = replicas
        self._policy = policy
        self._links: dict[str, IngressEnd] = {}
        self._unplaced: dict[str, LinkStream] = {}
        self._awaiting: dict[str, list[LinkStream]] = {}
        loop = asyncio.get_running_loop()
        replicas.add_listener(lambda: loop.call_soon_threadsafe(self._place_all))

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None) -> ItemStream:
        """Start an attempt."""
        routing = _routing_request(request, attempt_id, session)
        stream = LinkStream(pack_request(request, attempt_id), routing, lambda: self._unplaced.pop(attempt_id, None))
        self._unplaced[attempt_id] = stream
        self._place(stream)
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
                for stream in self._awaiting.pop(replica_id, ()):
                    stream.start(link)
            on_heartbeat(load)

        link = IngressEnd(key, heard)
        reason = LossReason.UNAVAILABLE
        try:
            async with asyncio.timeout(_OPENING_S) as opening:
                await asyncio.get_running_loop().create_connection(lambda: link, host, int(port))
                reason = await link.lost
        except OSError:
            pass
        finally:
            self._links.pop(replica_id, None)
            link.close()
            for stream in self._awaiting.pop(replica_id, ()):
                stream.lose(reason)
        raise ReplicaLostError(reason)

    def _place_all(self) -> None:
        for stream in list(self._unplaced.values()):
            self._place(stream)

    def _place(self, stream: "LinkStream") -> None:
        attempt = stream.attempt
        allowed = self._replicas.routable(self._replicas.current(), attempt.attempt_id)
        ranked = self._policy.rank(attempt, allowed, self._replicas.loads(), time.monotonic())
        if not ranked:
            return
        chosen = ranked[0]
        del self._unplaced[attempt.attempt_id]
        self._policy.routed(attempt, chosen)
        self._replicas.note_assigned(attempt.attempt_id, chosen)
        if (link := self._links.get(chosen)) is not None:
            stream.start(link)
        else:
            self._awaiting.setdefault(chosen, []).append(stream)


class LinkStream:
    """`ItemStream` of one attempt."""

    def __init__(self, request: WireRequest, attempt: RoutingRequest, give_up: Callable[[], object]) -> None:
        """`give_up` is called when it is cancelled before it was placed."""
        self.attempt = attempt
        self._request = request
        self._give_up = give_up
        self._link: IngressEnd | None = None
        self._is_cancelled = False
        self._items: asyncio.Queue[WireItem | ReplicaLostError] = asyncio.Queue()

    def start(self, link: IngressEnd) -> None:
        """It goes to the replica of this link, if somebody is still interested."""
        if not self._is_cancelled:
            self._link = link
            link.start(self._request, self._items.put_nowait)

    def lose(self, reason: LossReason) -> None:
        """Its replica is lost before it got there."""
        self._items.put_nowait(ReplicaLostError(reason))

    async def __anext__(self) -> WireItem:
        """The next item. Raises `ReplicaLostError`."""
        item = await self._items.get()
        if isinstance(item, ReplicaLostError):
            raise item
        return item

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""
        self._is_cancelled = True
        if self._link is None:
            self._give_up()
        else:
            self._link.cancel(self.attempt.attempt_id)


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
