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

_CONNECT_S = 5.0


class LinkTransport:
    """`Transport` over links. For one event loop, the one it is made on.

    Decides when an attempt is placed: at once, on the replica that `policy` ranks first among those that may have it
    and whose link is open; without one, as soon as there is one.
    """

    def __init__(self, replicas: ReplicaSet, policy: RoutingPolicy) -> None:
        self._replicas = replicas
        self._policy = policy
        self._links: dict[str, IngressEnd] = {}
        self._unplaced: dict[str, LinkStream] = {}
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
            is_new = replica_id not in self._links
            self._links[replica_id] = link
            on_heartbeat(load)
            if is_new:
                self._place_all()

        link = IngressEnd(key, heard)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: link, host, int(port))
        except OSError:
            raise ReplicaLostError(LossReason.UNAVAILABLE) from None
        try:
            raise ReplicaLostError(await link.lost)
        finally:
            self._links.pop(replica_id, None)
            link.close()

    def _place_all(self) -> None:
        for stream in list(self._unplaced.values()):
            self._place(stream)

    def _place(self, stream: "LinkStream") -> None:
        attempt = stream.attempt
        allowed = self._replicas.routable(self._links, attempt.attempt_id)
        ranked = self._policy.rank(attempt, allowed, self._replicas.loads(), time.monotonic())
        if not ranked:
            return
        chosen = ranked[0]
        del self._unplaced[attempt.attempt_id]
        self._policy.routed(attempt, chosen)
        self._replicas.note_assigned(attempt.attempt_id, chosen)
        stream.start(self._links[chosen])


class LinkStream:
    """`ItemStream` of one attempt."""

    def __init__(self, request: WireRequest, attempt: RoutingRequest, give_up: Callable[[], object]) -> None:
        """`give_up` is called when it is cancelled before it was placed."""
        self.attempt = attempt
        self._request = request
        self._give_up = give_up
        self._link: IngressEnd | None = None
        self._items: asyncio.Queue[WireItem | ReplicaLostError] = asyncio.Queue()

    def start(self, link: IngressEnd) -> None:
        """It goes to the replica of this link."""
        self._link = link
        link.start(self._request, self._items.put_nowait)

    async def __anext__(self) -> WireItem:
        """The next item. Raises `ReplicaLostError`."""
        item = await self._items.get()
        if isinstance(item, ReplicaLostError):
            raise item
        return item

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""
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
