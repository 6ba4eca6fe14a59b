"""The link's two ends over real sockets: what goes in comes out in order, and what is lost with a link is told."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgpack
import pytest
import uvloop

from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, FinishReason, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import OverloadedError
from serve_app.fleet import link as link_module
from serve_app.fleet.link import IngressEnd, LinkServer
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.wire import (
    WireDelta,
    WireItem,
    WireLoad,
    WireRequest,
    pack_deltas,
    pack_request,
    unpack_item,
    unpack_request,
)
from tests.fleet.replicas import until

LOAD: WireLoad = (1, 2, 3, 4, 5, 0.5)


def item(offset: int) -> list[WireDelta]:
    return [(0, offset, (offset + 5,))]


class Replica:
    """Its link server, with engine and heartbeats by hand."""

    def __init__(self) -> None:
        self.alive = True
        self.server = LinkServer(self.generate, lambda: LOAD if self.alive else None)
        self.address = ""
        self.requests: dict[str, WireRequest] = {}
        self.says: dict[str, asyncio.Queue[Any]] = {}
        """What each attempt yields, or raises; None ends it."""

    async def generate(self, data: WireRequest) -> AsyncGenerator[list[WireDelta], None]:
        attempt_id = data["attempt_id"]
        self.requests[attempt_id] = data
        said = self.says[attempt_id] = asyncio.Queue()
        try:
            while (what := await said.get()) is not None:
                if isinstance(what, Exception):
                    raise what
                yield what
        finally:
            del self.says[attempt_id]

    async def connect(self) -> asyncio.StreamWriter:
        host, _, port = self.address.rpartition(":")
        self.reader, writer = await asyncio.open_connection(host, int(port))
        return writer


class Ingress:
    """One link of an ingress to the replica, and what came by it."""

    def __init__(self, key: str) -> None:
        self.heard: list[WireLoad] = []
        self.items: dict[str, list[WireItem | ReplicaLostError]] = {}
        self.link = IngressEnd(key, self.heard.append)

    @staticmethod
    async def to(replica: Replica, key: str | None = None) -> "Ingress":
        ingress = Ingress(replica.server.key if key is None else key)
        host, _, port = replica.address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: ingress.link, host, int(port))
        return ingress

    @staticmethod
    async def open(replica: Replica) -> "Ingress":
        ingress = await Ingress.to(replica)
        await until(lambda: bool(ingress.heard))
        return ingress

    async def start(self, replica: Replica, attempt_id: str) -> "asyncio.Queue[Any]":
        items = self.items[attempt_id] = []

        def take(item: WireItem | ReplicaLostError) -> None:
            items.append(list(item) if isinstance(item, tuple) else item)

        self.link.start(pack_request(EngineRequest("r", (5, 6), SamplingParams()), attempt_id), take)
        await until(lambda: attempt_id in replica.says)
        return replica.says[attempt_id]


@asynccontextmanager
async def running() -> AsyncIterator[Replica]:
    replica = Replica()
    replica.address = await replica.server.listen("127.0.0.1")
    yield replica
    replica.server.close()
    await until(lambda: not replica.server.ends and not replica.server.attempts())


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with running() as replica:
        yield replica


async def test_what_comes_in_one_turn_of_the_loop_goes_in_one_frame(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    a, b = await ingress.start(replica, "a.1"), await ingress.start(replica, "b.1")
    frames = len(ingress.heard)
    a.put_nowait(item(0))
    b.put_nowait(item(3))
    a.put_nowait(item(1))
    await until(lambda: len(ingress.items["a.1"]) == 2)
    assert ingress.items == {"a.1": [item(0), item(1)], "b.1": [item(3)]}
    assert len(ingress.heard) == frames + 1
    a.put_nowait(item(2))
    await until(lambda: len(ingress.items["a.1"]) == 3)
    ingress.link.close()


def test_it_runs_on_the_event_loop_of_rays_processes() -> None:
    async def send_and_hang_up() -> None:
        async with running() as replica:
            ingress = await Ingress.open(replica)
            (await ingress.start(replica, "a.1")).put_nowait(item(0))
            await until(lambda: ingress.items["a.1"] == [item(0)])
            ingress.link.close()
            await until(lambda: not replica.says)

    uvloop.run(send_and_hang_up())


async def test_requests_and_every_kind_of_delta_travel_unchanged(replica: Replica) -> None:
    params = SamplingParams(n=2, seed=-(2**63), logit_bias=((3, -2.0),), stop_token_ids=(9,), max_tokens=7)
    request = EngineRequest("a.1", tuple(range(70_000)), params, prior_output_ids=((1, 2), ()), finished_choices=(1,))
    full = TokenDelta(
        request_id="a.1",
        choice=1,
        offset=2,
        token_ids=(3, 4),
        results={LOGPROBS: (TokenLogprob(3, -math.inf, ((5, -0.1), (6, -1e-300))), TokenLogprob(4, -0.25, ()))},
        prompt_results={LOGPROBS: (TokenLogprob(7, -1.5, ()),), "a kind that the link never heard of": ((0.5,),)},
        finish_reason=FinishReason.STOP,
        num_cached_tokens=9,
        error="broken",
    )
    plain = TokenDelta("a.1", 0, 0, (2**31,))
    ingress = await Ingress.open(replica)
    items: list[Any] = []
    ingress.link.start(pack_request(request, "a.1"), items.append)
    await until(lambda: "a.1" in replica.says)
    assert unpack_request(replica.requests["a.1"]) == request
    replica.says["a.1"].put_nowait(pack_deltas([full, plain]))
    await until(lambda: bool(items))
    assert unpack_item("a.1", items[0]) == [full, plain]
    ingress.link.close()


async def test_an_ingress_that_does_not_read_loses_its_link_and_nothing_piles_up(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 2**20)
    ingress, other = await Ingress.open(replica), await Ingress.open(replica)
    says = await ingress.start(replica, "slow")
    assert ingress.link._transport is not None
    ingress.link._transport.pause_reading()
    most = 0
    while len(replica.server.ends) == 2:
        says.put_nowait([(0, 0, (2**20,) * 10_000)])
        await asyncio.sleep(0)
        most = max(most, replica.server.unsent_bytes())
    assert 0 < most <= 2**20 + 60_000
    await until(lambda: not replica.server.attempts())
    assert replica.server.unsent_bytes() == 0
    await other.start(replica, "another")
    other.link.close()
    ingress.link.close()


async def test_heartbeats_go_alone_when_there_are_no_outputs(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.01)
    ingress = await Ingress.open(replica)
    await until(lambda: len(ingress.heard) > 3)
    assert set(ingress.heard) == {LOAD}
    ingress.link.close()


async def test_refusals_arrive_and_accidents_belong_to_their_attempt(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    ingress = await Ingress.open(replica)
    refused, unpackable, failed, fine = [await ingress.start(replica, f"{name}.1") for name in "abcd"]
    refused.put_nowait(OverloadedError("full", retry_after_s=3.0))
    unpackable.put_nowait([(0, object())])
    failed.put_nowait(ZeroDivisionError("secret"))
    fine.put_nowait(item(0))
    await until(lambda: all(ingress.items.values()))
    codes = {name: told[0]["code"] for name, told in ingress.items.items() if isinstance(told[0], dict)}
    assert codes == {"a.1": "queue_full", "b.1": "engine_error", "c.1": "engine_error"}
    assert ingress.items["d.1"] == [item(0)]
    assert "secret" not in str(ingress.items)
    assert [record.getMessage() for record in caplog.records] == ["attempt b.1 failed", "attempt c.1 failed"]
    ingress.link.close()


async def test_an_attempts_end_is_told_once(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    attempt = await ingress.start(replica, "a.1")
    attempt.put_nowait(item(0))
    attempt.put_nowait(None)
    await until(lambda: len(ingress.items["a.1"]) == 2)
    assert ingress.items["a.1"][0] == item(0)
    assert str(ingress.items["a.1"][1]) == "cut"
    ingress.link.close()
    await ingress.link.lost
    assert len(ingress.items["a.1"]) == 2


async def test_what_is_let_go_is_aborted_and_nothing_else(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    await ingress.start(replica, "a.1")
    b = await ingress.start(replica, "b.1")
    ingress.link.cancel("a.1")
    ingress.link.cancel("a.1")
    ingress.link.cancel("unknown")
    await until(lambda: set(replica.says) == {"b.1"})
    b.put_nowait(item(0))
    await until(lambda: ingress.items == {"a.1": [], "b.1": [item(0)]})
    ingress.link.close()


async def test_an_ingress_that_hangs_up_takes_its_attempts_with_it(replica: Replica) -> None:
    one, other = await Ingress.open(replica), await Ingress.open(replica)
    await one.start(replica, "a.1")
    await other.start(replica, "b.1")
    one.link.close()
    await until(lambda: set(replica.says) == {"b.1"})
    assert await one.link.lost is LossReason.UNAVAILABLE
    assert [str(loss) for loss in one.items["a.1"]] == ["unavailable"]
    assert other.items == {"b.1": []}
    late: list[Any] = []
    one.link.start(pack_request(EngineRequest("r", (5,), SamplingParams()), "c.1"), late.append)
    assert [str(loss) for loss in late] == ["refused"], "it was never sent, so nobody died of it"
    other.link.close()


async def test_a_dead_engine_ends_its_links_after_its_outputs(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    attempt = await ingress.start(replica, "a.1")
    replica.alive = False
    attempt.put_nowait(item(0))
    assert await ingress.link.lost is LossReason.ENGINE_DIED
    assert ingress.items["a.1"][0] == item(0)
    assert str(ingress.items["a.1"][1]) == "engine_died"
    later = await Ingress.to(replica)
    assert await later.link.lost is LossReason.ENGINE_DIED
    assert not later.heard


@pytest.mark.parametrize(
    "sent",
    [
        b"a" * 65,
        b"0" * 32,
        b"serve-app-link/1 " + b"0" * 32 + b"\n",
        b"serve-app-link/1\n",
        b"serve-app-link/" + b"1" * 200,
        msgpack.packb({"attempt_id": "a.1", "no": "key" * 9}),
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
    ],
    ids=["long", "no greeting", "another key", "no key", "endless", "a message", "a browser"],
)
async def test_strangers_are_hung_up_on_and_change_nothing(replica: Replica, sent: bytes) -> None:
    ingress = await Ingress.open(replica)
    writer = await replica.connect()
    writer.write(sent)
    with suppress(ConnectionResetError):
        assert await replica.reader.read() == b""
    writer.close()
    (await ingress.start(replica, "a.1")).put_nowait(item(0))
    await until(lambda: ingress.items == {"a.1": [item(0)]})
    assert set(replica.requests) == {"a.1"}
    ingress.link.close()


def greeting(replica: Replica, version: int = link_module.VERSION) -> bytes:
    return f"serve-app-link/{version} {replica.server.key}\n".encode()


async def test_a_greeting_may_come_in_pieces_and_with_more(replica: Replica) -> None:
    key = greeting(replica)
    request = msgpack.packb(pack_request(EngineRequest("r", (5, 6), SamplingParams()), "a.1"))
    writer = await replica.connect()
    for piece in (key[:9], key[9:20], key[20:] + request[:7], request[7:]):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    await until(lambda: "a.1" in replica.says)
    writer.close()


async def test_who_says_nothing_is_hung_up_on(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_HELLO_S", 0.01)
    writer = await replica.connect()
    with suppress(ConnectionResetError):
        assert await replica.reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "sent", [b"\xc1", msgpack.packb(5), msgpack.packb({})], ids=["no msgpack", "a number", "no id"]
)
async def test_who_says_what_no_ingress_says_is_hung_up_on(replica: Replica, sent: bytes) -> None:
    writer = await replica.connect()
    writer.write(greeting(replica))
    assert await replica.reader.readline() == f"serve-app-link/{link_module.VERSION}\n".encode()
    writer.write(sent)
    with suppress(ConnectionResetError):
        await replica.reader.read()
    writer.close()


async def test_an_ingress_of_another_version_is_told_ours_and_hung_up_on(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    writer = await replica.connect()
    writer.write(greeting(replica, version=7))
    assert await replica.reader.read() == f"serve-app-link/{link_module.VERSION}\n".encode()
    assert caplog.messages == ["an ingress speaks version 7 of the link, this replica 1: hung up"]
    writer.close()


@asynccontextmanager
async def peer(*pieces: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A replica that says these bytes to whoever comes: its address, and an entry for each that came."""
    came: list[int] = []
    writers = []

    async def say(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(1)
        writers.append(writer)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", came
    for writer in writers:
        writer.close()
    server.close()


async def lost(address: str) -> LossReason:
    """Why the link to this address ends."""
    ingress = Ingress("key")
    host, _, port = address.rpartition(":")
    await asyncio.get_running_loop().create_connection(lambda: ingress.link, host, int(port))
    return await asyncio.wait_for(ingress.link.lost, 20)


@pytest.mark.parametrize(
    ("said", "speaks"),
    [((b"serve-app-", b"link/2\n"), "version 2"), ((b"\x92\x96",), "no version")],
    ids=["another version", "no greeting"],
)
async def test_a_replica_of_another_version_is_lost_in_one_line(
    caplog: pytest.LogCaptureFixture, said: tuple[bytes, ...], speaks: str
) -> None:
    async with peer(*said) as (address, _):
        assert await lost(address) is LossReason.INCOMPATIBLE
    line = f"the replica at {address} speaks {speaks} of the link, this ingress version 1: it gets no requests"
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    "frame",
    [b"\xc1", *map(msgpack.packb, (5, [LOAD], [LOAD, 5], [LOAD, [[]]], ["no reason", []], [None, []]))],
    ids=["no msgpack", "a number", "no outputs", "outputs are a number", "an empty item", "no reason", "no load"],
)
async def test_a_malformed_frame_ends_the_link_in_one_line(caplog: pytest.LogCaptureFixture, frame: bytes) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with peer(b"serve-app-link/1\n" + frame) as (address, _):
        ingress = Ingress("key")
        ingress.link = IngressEnd("key", lambda load: ingress.heard.append((*load,)))
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: ingress.link, host, int(port))
        assert await asyncio.wait_for(ingress.link.lost, 20) is LossReason.UNAVAILABLE
    (line,) = caplog.messages
    assert line.startswith(f"the replica at {address} sent what is no frame of the link (")
    assert errors == []


async def test_a_replica_is_drained_when_every_ingress_has_hung_up(replica: Replica) -> None:
    await replica.server.drained()
    one, other = await Ingress.open(replica), await Ingress.open(replica)
    drained = asyncio.create_task(replica.server.drained())
    other.link.close()
    await until(lambda: len(replica.server.ends) == 1)
    (await one.start(replica, "a.1")).put_nowait(None)
    await until(lambda: not replica.says)
    assert not drained.done(), "it may have more for a replica that is leaving"
    one.link.close()
    await asyncio.wait_for(drained, 10)


async def test_a_replica_that_closes_says_that_it_leaves(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    replica.server.close()
    assert await ingress.link.lost is LossReason.LEFT
