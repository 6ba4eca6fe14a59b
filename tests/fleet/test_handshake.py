"""Who may open a link: only who proves to know its key, in words of this version, and soon."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgpack
import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet import link as link_module
from serve_app.fleet.handshake import VERSION, Handshake
from serve_app.fleet.loss import LossReason
from serve_app.fleet.wire import pack_request
from tests.fleet.links import Ingress, Replica, item, peer, running
from tests.fleet.replicas import until

NAME = f"serve-app-link/{VERSION}".encode()
NONCE = b"0" * 32


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with running() as replica:
        yield replica


async def hung_up(reader: asyncio.StreamReader) -> bytes:
    """What came before the other end hung up."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 20)
    return b""


@pytest.mark.parametrize(
    "sent",
    [
        b"a" * 65,
        b"0" * 32,
        NAME + b"\n",
        NAME + b" " + NONCE + b" " + NONCE + b"\n",
        b"serve-app-link/" + b"1" * 300,
        msgpack.packb({"attempt_id": "a.1", "no": "key" * 9}),
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
    ],
    ids=["long", "a key", "no nonce", "two words", "endless", "a message", "a browser"],
)
async def test_unauthenticated_peers_are_disconnected_and_change_nothing(
    replica: Replica, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ingress = await Ingress.open(replica)
    for _ in range(3):
        reader, writer = await replica.connect()
        writer.write(sent)
        assert await hung_up(reader) == b""
        writer.close()
    (line,) = caplog.messages
    assert line.endswith("does not use the link protocol; connection closed")
    await ingress.start(replica, "a.1")
    replica.say("a.1", 0)
    await until(lambda: ingress.received() == {"a.1": [item(0)]})
    assert set(replica.requests) == {"a.1"}
    ingress.link.close()


async def test_it_may_come_in_pieces_and_with_more(replica: Replica) -> None:
    handshake = Handshake.of_ingress(replica.server.key)
    reader, writer = await replica.connect()

    async def send(*pieces: bytes) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    await send(handshake.opening[:9], handshake.opening[9:])
    proof = handshake.receive(await reader.readline())
    request = msgpack.packb(pack_request(EngineRequest("r", (5, 6), SamplingParams()), "a.1"))
    await send(proof[:20], proof[20:] + request[:7], request[7:])
    await until(lambda: "a.1" in replica.requests)
    writer.close()


async def test_a_proof_by_another_key_opens_nothing(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has one replica's key and knows how proofs are made cannot talk to another
    replica."""
    reader, writer = await replica.connect()
    writer.write(NAME + b" " + NONCE + b"\n")
    theirs = (await reader.readline()).split()[1]
    forged = Handshake.of_replica("another key").receive(NAME + b" " + theirs + b"\n").split()[2]
    writer.write(NAME + b" " + forged + b"\n")
    assert await hung_up(reader) == b""
    writer.close()
    (line,) = caplog.messages
    assert line.endswith("does not have the link's key; connection closed")
    assert not replica.server.ends


async def test_an_ingress_sends_nothing_to_a_replica_that_does_not_know_the_key(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    ingress = await Ingress.to(replica, key="another key")
    assert await asyncio.wait_for(ingress.link.lost, 20) is LossReason.INCOMPATIBLE
    assert caplog.messages == [f"the replica at {replica.address} does not have the link's key; it gets no requests"]
    assert not ingress.heard


async def test_the_replicas_own_proof_does_not_pass_for_the_ingresss(replica: Replica) -> None:
    reader, writer = await replica.connect()
    writer.write(NAME + b" " + NONCE + b"\n")
    writer.write(NAME + b" " + (await reader.readline()).split()[2] + b"\n")
    assert await hung_up(reader) == b""
    writer.close()


async def test_what_was_overheard_is_no_key_and_opens_no_other_link(replica: Replica) -> None:
    sent, answered = bytearray(), bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await replica.connect()

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, record: bytearray) -> None:
            with suppress(ConnectionResetError):
                while part := await source.read(2**16):
                    record += part
                    sink.write(part)
            sink.close()

        await asyncio.gather(pass_on(reader, ahead, sent), pass_on(behind, writer, answered))

    async with peer(relay) as address:
        ingress = Ingress(replica.server.key)
        await ingress.connect(address)
        await until(lambda: bool(ingress.heard))
        await ingress.start(replica, "a.1")
        replica.say("a.1", 0)
        await until(lambda: ingress.received() == {"a.1": [item(0)]})
        ingress.link.close()
        await until(lambda: not replica.server.ends)
    assert replica.server.key.encode() not in sent + answered
    reader, writer = await replica.connect()
    writer.write(sent)
    assert len((await hung_up(reader)).split()) in (0, 3), "its half of the handshake, and no heartbeat"
    writer.close()
    assert list(replica.requests) == ["a.1"]

    async def replay(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answered)

    async with peer(replay) as address:
        victim = Ingress(replica.server.key)
        await victim.connect(address)
        assert await asyncio.wait_for(victim.link.lost, 20) is LossReason.INCOMPATIBLE
        assert not victim.heard


async def test_who_says_nothing_is_hung_up_on(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_HANDSHAKE_S", 0.01)
    reader, writer = await replica.connect()
    assert await hung_up(reader) == b""
    writer.close()


async def test_thousands_who_say_nothing_keep_no_ingress_out_and_no_replica_from_leaving(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def come(number: int) -> None:
        for _ in range(number):
            silent.append(await replica.connect())
            if len(silent) > 2 * link_module.MAX_UNAUTHENTICATED:
                reader, writer = silent.pop(0)
                assert await hung_up(reader) == b""
                writer.close()

    await come(1000)
    ingress, _ = await asyncio.gather(Ingress.open(replica), come(1000))
    assert len(replica.server.ends) == 1
    assert 1 <= len(caplog.messages) <= 5, "as many lines as connections would fill the disk"
    ingress.link.close()
    await asyncio.wait_for(replica.server.drained(), 20)
    for _, writer in silent:
        writer.close()


@pytest.mark.parametrize("version", [1, VERSION + 1])
async def test_an_ingress_of_another_version_is_told_ours_and_hung_up_on(
    replica: Replica, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    reader, writer = await replica.connect()
    host, port = writer.get_extra_info("sockname")
    writer.write(f"serve-app-link/{version} {replica.server.key}\n".encode())
    assert await hung_up(reader) == NAME + b"\n"
    speaks = f"uses version {version} of the link protocol, this end uses version {VERSION}"
    assert caplog.messages == [f"the peer at {host}:{port} {speaks}; connection closed"]
    writer.close()


@pytest.mark.parametrize(
    ("said", "does"),
    [
        ((b"serve-app-", b"link/1\n"), f"uses version 1 of the link protocol, this end uses version {VERSION}"),
        (
            (b"serve-app-link/30 what ever comes\n",),
            f"uses version 30 of the link protocol, this end uses version {VERSION}",
        ),
        ((b"\x92\x96",), "does not use the link protocol"),
        ((NAME + b" " + NONCE + b"\n",), "does not use the link protocol"),
        ((NAME + b" " + NONCE + b" " + b"0" * 64 + b"\n",), "does not have the link's key"),
    ],
    ids=["an older version", "a newer version", "no greeting", "no proof", "another key"],
)
async def test_a_replica_that_is_none_of_ours_is_lost_in_one_line(
    caplog: pytest.LogCaptureFixture, said: tuple[bytes, ...], does: str
) -> None:
    async def say(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in said:
            writer.write(piece)
            await writer.drain()

    async with peer(say) as address:
        ingress = Ingress("key")
        await ingress.connect(address)
        assert await asyncio.wait_for(ingress.link.lost, 20) is LossReason.INCOMPATIBLE
    assert caplog.messages == [f"the replica at {address} {does}; it gets no requests"]


async def test_both_ends_agree_in_three_lines() -> None:
    ingress, replica = Handshake.of_ingress("key"), Handshake.of_replica("key")
    hello = replica.receive(ingress.opening)
    assert (replica.opening, replica.receive(ingress.receive(hello) + b"more")) == (b"", b"")
    assert (ingress.rest, replica.rest) == (b"", b"more")
