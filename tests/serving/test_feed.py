"""The feed's two ends: what goes in comes out in order, and what is lost with it ends the attempt."""

import asyncio

import pytest

from serve_app.errors import EngineError
from serve_app.serving import feed
from serve_app.serving.attempt import LossReason, ReplicaLostError
from serve_app.serving.feed import FedStream, Outbox
from serve_app.serving.wire import WireDelta, WireItem


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


async def test_an_outbox_gives_all_of_a_step_at_once() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take(60.0))
    await asyncio.sleep(0)
    outbox.put("a.1", item(0))
    outbox.put("b.1", item(3))
    assert await taking == [("a.1", item(0)), ("b.1", item(3))]
    assert await outbox.take(0.0) == []
    outbox.put("a.1", item(1))
    assert await outbox.take(60.0) == [("a.1", item(1))]


async def test_closing_an_outbox_ends_the_wait() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take(60.0))
    await asyncio.sleep(0)
    outbox.close()
    assert await taking == []
    assert not outbox.is_open


async def test_an_outbox_knows_whether_attempts_use_it() -> None:
    outbox = Outbox()
    with outbox.used():
        with pytest.raises(KeyError), outbox.used():
            raise KeyError
        assert outbox.in_use
    assert not outbox.in_use
    with outbox.used():
        outbox.put("a.1", item(0))
    assert outbox.in_use  # with what its last attempt sent
    await outbox.take(60.0)
    assert not outbox.in_use


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
    monkeypatch.setattr(feed, "_REST_S", 0.05)
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
