"""The feed: one stream per ingress and replica, which carries the news of all requests between the two.

A streamed item costs Ray about 0.6 ms of processor time, whatever is in it; news of 16 requests would pay that 16
times. So each ingress keeps one streaming call open at each replica, and all that the engine delivers at once comes as
one item. The call that runs a request still decides how its attempt fares: it is what the router places, what is
cancelled, and what breaks when the replica dies.

Decides which way an attempt's items take: the feed when one is open as the attempt begins, its own call otherwise, and
never first one and then the other, since nothing keeps the order between them. Items that are lost with a feed end the
attempt; failover makes the next one.
"""

import asyncio
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

from serve_app.serving.attempt import ItemStream, LossReason, ReplicaLostError
from serve_app.serving.wire import WireDelta, WireItem, WireNews

_REST_S = 5.0
"""How long an attempt's last items may take by the feed after its call has ended."""


class Outbox:
    """At the replica: what one ingress's feed takes next. For one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self._news: dict[str, list[WireDelta]] = {}
        self._has_news = asyncio.Event()
        self._num_users = 0

    @property
    def in_use(self) -> bool:
        """Whether attempts send their items this way, or have sent some that nobody has taken yet."""
        return self._num_users > 0 or bool(self._news)

    @contextmanager
    def used(self) -> Iterator[None]:
        """By one attempt, while the context lasts."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1

    def put(self, attempt_id: str, deltas: list[WireDelta]) -> None:
        """Send them with the feed's next item."""
        self._news.setdefault(attempt_id, []).extend(deltas)
        self._has_news.set()

    async def take(self, wait_s: float) -> list[WireNews]:
        """All there is, as soon as there is any; nothing when `wait_s` have passed without."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._has_news.wait()
        self._has_news.clear()
        news, self._news = self._news, {}
        return list(news.items())

    def close(self) -> None:
        """Nobody takes any more."""
        self.is_open = False
        self._has_news.set()


class FedStream:
    """At the ingress: the items of one attempt, which come by the feed or by `call`. `streams` has it until cancelled.

    An attempt's reader leaves once it has everything. One that is still here after its call has ended is waiting for
    items that are on their way by the feed, or were lost with it.
    """

    def __init__(self, call: ItemStream, attempt_id: str, streams: "MutableMapping[str, FedStream]") -> None:
        self._call = call
        self._attempt_id = attempt_id
        self._streams = streams
        self._items: asyncio.Queue[WireItem | Exception] = asyncio.Queue()
        self._following = asyncio.create_task(self._follow_call())
        streams[attempt_id] = self

    async def __anext__(self) -> WireItem:
        """The next item. Raises `ReplicaLostError`, `RequestError`."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def feed(self, item: WireItem) -> None:
        """Take an item that came by the feed."""
        self._items.put_nowait(item)

    def cancel(self) -> None:
        """Let go: the replica is told to abort. Idempotent, does not wait."""
        self._streams.pop(self._attempt_id, None)
        self._following.cancel()
        self._call.cancel()

    async def _follow_call(self) -> None:
        try:
            while True:
                self._items.put_nowait(await anext(self._call))
        except StopAsyncIteration:
            await asyncio.sleep(_REST_S)
            self._items.put_nowait(ReplicaLostError(LossReason.CUT))
        except Exception as error:
            self._items.put_nowait(error)
