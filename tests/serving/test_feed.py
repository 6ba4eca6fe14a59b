"""The feed's two ends: what goes in comes out in order, and what is lost with it ends the attempt."""

import asyncio
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import pytest
import uvloop

from serve_app.core.output import FinishReason, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.serving import feed as feed_module
from serve_app.serving.attempt import LossReason, ReplicaLostError
from serve_app.serving.feed import FedStream, Outbox, Outboxes, read_feed
from serve_app.serving.wire import WireDelta, WireFeedItem, WireItem, WireLoad, pack_deltas, unpack_item

F, G = uuid4().hex, uuid4().hex
LOAD: WireLoad = (1, 2, 3, 4, 5, 0.5)


def item(offset: int) -> list[WireDelta]:
    return [(0, offset, [offset + 5])]


class Call:
    """An attempt's own call: yields what it is told to, raises what it is told to, ends at None."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[WireItem | Exception | None] = asyncio.Queue()
        self.cancelled = 0

    async def __anext__(self) -> WireItem:
        said = await self.says.get()
        if said is None:
            raise StopAsyncIteration
        if isinstance(said, Exception):
            raise said
        return said

    def cancel(self) -> None:
        self.cancelled += 1


class Replica:
    """A replica's feeds, with heartbeats by hand."""

    def __init__(self) -> None:
        self.alive = True
        self.outboxes = Outboxes("r", lambda: LOAD if self.alive else None)
        self.address = ""

    async def reach(self, name: str) -> tuple[AsyncGenerator[WireFeedItem, None], Outbox]:
        """Both ends of a feed of this name."""
        feed = read_feed(self.address, name, "r")
        assert await anext(feed) == (LOAD, ()), "at once, so that the reader knows that it is open"
        outbox = self.outboxes.get(name)
        assert outbox is not None
        return feed, outbox


@asynccontextmanager
async def running() -> AsyncIterator[Replica]:
    replica = Replica()
    server = await asyncio.get_running_loop().create_server(replica.outboxes.accept, "127.0.0.1", 0)
    replica.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield replica
    server.close()
    for name in (F, G):
        if (outbox := replica.outboxes.get(name)) is not None:
            outbox.close()
    await server.wait_closed()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with running() as replica:
        yield replica


async def until_closed(outbox: Outbox) -> None:
    async with asyncio.timeout(10):
        while outbox.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_comes_in_one_turn_of_the_loop_goes_in_one_frame(replica: Replica) -> None:
    feed, outbox = await replica.reach(F)
    outbox.put("a.1", item(0))
    outbox.put("b.1", item(3))
    outbox.put("a.1", item(1))
    assert unpacked(await anext(feed)) == [("a.1", item(0) + item(1)), ("b.1", item(3))]
    outbox.put("a.1", item(2))
    assert unpacked(await anext(feed)) == [("a.1", item(2))]
    await feed.aclose()


def test_it_runs_on_the_event_loop_of_rays_processes() -> None:
    async def send_and_hang_up() -> None:
        async with running() as replica:
            feed, outbox = await replica.reach(F)
            outbox.put("a.1", item(0))
            assert unpacked(await anext(feed)) == [("a.1", item(0))]
            await feed.aclose()
            await until_closed(outbox)

    uvloop.run(send_and_hang_up())


async def test_every_kind_of_delta_travels_unchanged(replica: Replica) -> None:
    full = TokenDelta(
        request_id="a.1",
        choice=1,
        offset=2,
        token_ids=(3, 4),
        logprobs=(TokenLogprob(3, -math.inf, ((5, -0.1), (6, -1e-300))), TokenLogprob(4, -0.25, ())),
        prompt_logprobs=(TokenLogprob(7, -1.5, ()),),
        finish_reason=FinishReason.STOP,
        num_cached_tokens=9,
        error="broken",
    )
    plain = TokenDelta("a.1", 0, 0, (2**31,))
    feed, outbox = await replica.reach(F)
    outbox.put("a.1", pack_deltas([full, plain]))
    _, ((attempt_id, news),) = await anext(feed)
    assert unpack_item(attempt_id, news) == [full, plain]
    await feed.aclose()


async def test_heartbeats_go_alone_when_there_is_no_news(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "HEARTBEAT_S", 0.01)
    feed, outbox = await replica.reach(F)
    for _ in range(3):
        assert await anext(feed) == (LOAD, ())
    assert outbox.is_open
    await feed.aclose()


async def test_either_end_notices_that_the_other_hangs_up(replica: Replica) -> None:
    feed, outbox = await replica.reach(F)
    await feed.aclose()
    await until_closed(outbox)
    assert replica.outboxes.get(F) is None
    feed, outbox = await replica.reach(F)
    outbox.close()
    with pytest.raises((StopAsyncIteration, ConnectionResetError)):
        await anext(feed)
    assert not outbox.is_open


async def test_opening_a_feed_again_ends_the_former_one_and_no_other(replica: Replica) -> None:
    former, closed = await replica.reach(F)
    other, untouched = await replica.reach(G)
    feed, outbox = await replica.reach(F)
    with pytest.raises(StopAsyncIteration):
        await anext(former)
    assert (closed.is_open, untouched.is_open, outbox.is_open) == (False, True, True)
    outbox.put("a.1", item(0))
    assert unpacked(await anext(feed)) == [("a.1", item(0))]
    await feed.aclose()
    await other.aclose()


async def test_a_dead_engine_feeds_nobody(replica: Replica) -> None:
    feed, outbox = await replica.reach(F)
    replica.alive = False
    outbox.put("a.1", item(0))
    with pytest.raises(StopAsyncIteration):
        await anext(feed)
    with pytest.raises(StopAsyncIteration):
        await anext(read_feed(replica.address, F, "r"))


@pytest.mark.parametrize(
    "sent",
    [
        b"a" * 129,
        b"x" * 32 + b" r\n",
        f"{F}\n".encode(),
        f"{F} another\n".encode(),
        b"GET / HTTP/1.1\r\nHost: r\r\n\r\n",
    ],
    ids=["long", "no name", "no replica", "another replica", "a browser"],
)
async def test_strangers_are_hung_up_on_and_change_nothing(replica: Replica, sent: bytes) -> None:
    feed, outbox = await replica.reach(F)
    reader, writer = await asyncio.open_connection(*replica.address.rsplit(":", 1))
    writer.write(sent)
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert outbox.is_open
    outbox.put("a.1", item(0))
    assert unpacked(await anext(feed)) == [("a.1", item(0))]
    await feed.aclose()


async def test_who_says_more_than_a_name_loses_the_feed(replica: Replica) -> None:
    reader, writer = await asyncio.open_connection(*replica.address.rsplit(":", 1))
    writer.write(f"{F} r\n".encode())
    await reader.readexactly(4)
    outbox = replica.outboxes.get(F)
    assert outbox is not None
    writer.write(b"\xff")
    await until_closed(outbox)
    assert replica.outboxes.get(F) is None
    writer.close()


async def test_nobody_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(OSError, match="onnect"):
            await anext(read_feed(f"127.0.0.1:{taken.getsockname()[1]}", F, "r"))


def unpacked(frame: WireFeedItem) -> list[tuple[str, list[WireDelta]]]:
    _, news = frame
    return [(attempt_id, [(c, o, list(ids)) for c, o, ids in deltas]) for attempt_id, deltas in news]


async def test_items_come_by_the_feed_or_the_call_and_the_calls_error_last() -> None:
    streams: dict[str, FedStream] = {}
    call = Call()
    stream = FedStream(call, "a.1", streams)
    streams["a.1"].feed(item(0))
    assert await anext(stream) == item(0)
    call.says.put_nowait(item(1))
    assert await anext(stream) == item(1)
    stream.feed(item(2))
    call.says.put_nowait(EngineError("broken"))
    assert await anext(stream) == item(2)
    with pytest.raises(EngineError, match="broken"):
        await anext(stream)
    stream.cancel()
    stream.cancel()
    assert call.cancelled
    assert streams == {}


async def test_the_rest_may_come_after_the_calls_end_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_REST_S", 0.05)
    call = Call()
    stream = FedStream(call, "a.1", {})
    call.says.put_nowait(None)
    reading = asyncio.create_task(anext_of(stream))
    await asyncio.sleep(0)
    stream.feed(item(0))
    assert await reading == item(0)
    with pytest.raises(ReplicaLostError) as caught:
        await anext(stream)
    assert caught.value.reason is LossReason.CUT
    stream.cancel()


async def anext_of(stream: FedStream) -> WireItem:
    return await anext(stream)
