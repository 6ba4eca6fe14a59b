"""The link's two ends over real sockets: what goes in comes out in order, and what is lost with a
link is told."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import uvloop

from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, FinishReason, RequestOutputs, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import OverloadedError
from serve_app.fleet import link as link_module
from serve_app.fleet.handshake import Handshake
from serve_app.fleet.link import IngressEnd
from serve_app.fleet.loss import LossReason
from serve_app.fleet.wire import pack_request, unpack_item
from tests.fleet.links import LOAD, Ingress, Replica, item, outputs, peer, running, shake_hands
from tests.fleet.replicas import until

REQUEST = msgpack.packb(pack_request(EngineRequest("r", (5,), SamplingParams()), "a.1"))


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with running() as replica:
        yield replica


async def test_what_is_published_together_goes_in_one_frame_to_each_ingress(replica: Replica) -> None:
    ingress, other = await Ingress.open(replica), await Ingress.open(replica)
    await ingress.start(replica, "a.1", "b.1")
    await other.start(replica, "c.1")
    frames = len(ingress.heard), len(other.heard)
    replica.server.publish([outputs("a.1", 0), outputs("c.1", 7), outputs("b.1", 3), outputs("nobody's", 1)])
    await until(lambda: bool(ingress.items["b.1"]) and bool(other.items["c.1"]))
    assert ingress.received() == {"a.1": [item(0)], "b.1": [item(3)]}
    assert other.received() == {"c.1": [item(7)]}
    assert (len(ingress.heard), len(other.heard)) == (frames[0] + 1, frames[1] + 1)
    replica.say("a.1", 1)
    await until(lambda: ingress.received()["a.1"] == [item(0), item(1)])
    ingress.link.close()
    other.link.close()


def test_it_runs_on_the_event_loop_of_rays_processes() -> None:
    async def send_and_hang_up() -> None:
        async with running() as replica:
            ingress = await Ingress.open(replica)
            await ingress.start(replica, "a.1")
            replica.say("a.1", 0)
            await until(lambda: ingress.received()["a.1"] == [item(0)])
            ingress.link.close()
            await until(lambda: not replica.running)

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
    )
    plain = TokenDelta("a.1", 0, 0, (2**31,))
    ingress = await Ingress.open(replica)
    items: list[Any] = []
    ingress.link.start(pack_request(request, "a.1"), items.append)
    await until(lambda: "a.1" in replica.requests)
    assert replica.requests["a.1"] == request
    replica.server.publish([RequestOutputs("a.1", [full, plain])])
    await until(lambda: bool(items))
    assert unpack_item("a.1", items[0]) == [full, plain]
    ingress.link.close()


async def test_an_ingress_that_does_not_read_loses_its_link_and_nothing_piles_up(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 2**20)
    ingress, other = await Ingress.open(replica), await Ingress.open(replica)
    await ingress.start(replica, "slow")
    much = RequestOutputs("slow", [TokenDelta("slow", 0, 0, (2**20,) * 10_000)])
    assert ingress.link._transport is not None
    ingress.link._transport.pause_reading()
    most = 0
    while len(replica.server.ends) == 2:
        replica.server.publish([much])
        await asyncio.sleep(0)
        most = max(most, replica.server.unsent_bytes())
    assert 0 < most <= 2**20 + 60_000
    await until(lambda: not replica.running)
    assert not replica.server.attempts
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
    replica.failures = {"a.1": OverloadedError("full", retry_after_s=3.0), "b.1": ZeroDivisionError("secret")}
    await ingress.start(replica, "a.1", "b.1", "c.1", "d.1", "e.1")
    unpackable = TokenDelta("c.1", 0, 0, (5,), results={LOGPROBS: (object(),)})
    refused = outputs("d.1", ended=True, error=OverloadedError("full"))
    replica.server.publish([RequestOutputs("c.1", [unpackable]), refused, outputs("e.1", 0)])
    await until(lambda: all(ingress.items.values()))
    codes = {name: told[0]["code"] for name, told in ingress.items.items() if isinstance(told[0], dict)}
    assert codes == {"a.1": "queue_full", "b.1": "engine_error", "c.1": "engine_error", "d.1": "queue_full"}
    assert ingress.received()["e.1"] == [item(0)]
    assert "secret" not in str(ingress.items)
    assert [record.getMessage() for record in caplog.records] == ["attempt b.1 failed", "attempt c.1 failed"]
    assert "c.1" not in replica.running, "aborted"
    assert set(replica.server.attempts) == {"e.1"}
    ingress.link.close()


async def test_an_attempts_end_is_told_once(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    await ingress.start(replica, "a.1")
    replica.say("a.1", 0, ended=True)
    await until(lambda: len(ingress.items["a.1"]) == 2)
    assert ingress.received()["a.1"][0] == item(0)
    assert str(ingress.items["a.1"][1]) == "cut"
    ingress.link.close()
    await ingress.link.lost
    assert len(ingress.items["a.1"]) == 2


async def test_what_is_let_go_is_aborted_and_nothing_else(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    other = await Ingress.open(replica)
    await ingress.start(replica, "a.1", "b.1")
    other.items["b.1"] = []
    other.link._write(msgpack.packb("b.1"))
    ingress.link.cancel("a.1")
    ingress.link.cancel("a.1")
    ingress.link.cancel("unknown")
    await until(lambda: replica.running == {"b.1"})
    await other.start(replica, "c.1")  # so that what the other one wrote before has come as well
    replica.server.publish([outputs("a.1", 0), outputs("b.1", 0)])
    await until(lambda: ingress.received() == {"a.1": [], "b.1": [item(0)]})
    ingress.link.close()
    other.link.close()


async def test_an_ingress_that_hangs_up_takes_its_attempts_with_it(replica: Replica) -> None:
    one, other = await Ingress.open(replica), await Ingress.open(replica)
    await one.start(replica, "a.1")
    await other.start(replica, "b.1")
    one.link.close()
    await until(lambda: replica.running == {"b.1"})
    assert await one.link.lost is LossReason.UNAVAILABLE
    assert [str(loss) for loss in one.items["a.1"]] == ["unavailable"]
    assert other.items == {"b.1": []}
    late: list[Any] = []
    one.link.start(pack_request(EngineRequest("r", (5,), SamplingParams()), "c.1"), late.append)
    assert [str(loss) for loss in late] == ["refused"], "it was never sent, so nobody died of it"
    other.link.close()


async def test_a_dead_engine_ends_its_links_after_its_outputs(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    await ingress.start(replica, "a.1")
    replica.alive = False
    replica.say("a.1", 0)
    assert await ingress.link.lost is LossReason.ENGINE_DIED
    assert ingress.received()["a.1"][0] == item(0)
    assert str(ingress.items["a.1"][1]) == "engine_died"
    later = await Ingress.to(replica)
    assert await later.link.lost is LossReason.ENGINE_DIED
    assert not later.heard


@pytest.mark.parametrize(
    "sent",
    [
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb({}),
        2 * REQUEST,
    ],
    ids=["no msgpack", "a number", "no id", "an id twice"],
)
async def test_who_says_what_no_ingress_says_is_hung_up_on(replica: Replica, sent: bytes) -> None:
    reader, writer = await replica.connect()
    await shake_hands(Handshake.of_ingress(replica.server.key), reader, writer)
    writer.write(sent)
    with suppress(ConnectionResetError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "frame",
    [b"\xc1", *map(msgpack.packb, (5, [LOAD], [LOAD, 5], [LOAD, [[]]], ["no reason", []], [None, []]))],
    ids=["no msgpack", "a number", "no outputs", "outputs are a number", "an empty item", "no reason", "no load"],
)
async def test_a_malformed_frame_ends_the_link_in_one_line(caplog: pytest.LogCaptureFixture, frame: bytes) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await shake_hands(Handshake.of_replica("key"), reader, writer)
        writer.write(frame)

    async with peer(say) as address:
        ingress = Ingress("key")
        ingress.link = IngressEnd("key", lambda load: ingress.heard.append((*load,)))
        await ingress.connect(address)
        assert await asyncio.wait_for(ingress.link.lost, 20) is LossReason.UNAVAILABLE
    (line,) = caplog.messages
    assert line.startswith(f"the replica at {address} sent an invalid frame (")
    assert errors == []


async def test_a_replica_is_drained_when_every_ingress_has_hung_up(replica: Replica) -> None:
    await replica.server.drained()
    one, other = await Ingress.open(replica), await Ingress.open(replica)
    drained = asyncio.create_task(replica.server.drained())
    other.link.close()
    await until(lambda: len(replica.server.ends) == 1)
    await one.start(replica, "a.1")
    replica.say("a.1", ended=True)
    await until(lambda: bool(one.items["a.1"]))
    assert not drained.done(), "it may have more for a replica that is leaving"
    one.link.close()
    await asyncio.wait_for(drained, 10)


async def test_a_replica_that_closes_says_that_it_leaves(replica: Replica) -> None:
    ingress = await Ingress.open(replica)
    replica.server.close()
    assert await ingress.link.lost is LossReason.LEFT
