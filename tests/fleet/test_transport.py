"""Where attempts are placed, and when: real links to one real engine under several names."""

import asyncio
import gc
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch

from serve_app.core.request import EngineRequest
from serve_app.core.results import RequestOutputs
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import OverloadedError
from serve_app.fleet import transport as transport_module
from serve_app.fleet.attempt import Attempt, Replica
from serve_app.fleet.failover import Failover
from serve_app.fleet.link import LINK, LinkServer
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.prefix_routing import PrefixRouting
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.transport import LinkTransport
from serve_app.fleet.unread import UnreadBytes
from serve_app.fleet.watchdog import Watchdog
from serve_app.fleet.wire import WireLoad, pack_load
from serve_app.model import loader
from tests.engine.streams import StreamEngine
from tests.fleet.replicas import one_by_one, told, until
from tests.models import tiny_model

REQUEST = EngineRequest("r", tuple(range(5, 125)), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))


@dataclass
class Fleet:
    """An ingress's side of a fleet whose replicas can be added and lost."""

    engine: StreamEngine
    replicas: ReplicaSet = field(default_factory=ReplicaSet)
    policy: PrefixRouting = field(default_factory=PrefixRouting)
    servers: dict[str, LinkServer] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: list[LossReason] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """How long the prompts were whose attempts began, in order."""
    num_refusals: int = 0
    frozen: bool = False
    """Attempts get no further than their first outputs."""
    stuck: set[str] = field(default_factory=set)
    """Those that did not."""
    num_prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Of attempts that have not begun."""

    def __post_init__(self) -> None:
        self.transport = LinkTransport(self.replicas, self.policy)
        self.failover = Failover(
            self.transport,
            self.replicas,
            wait_s=20.0,
            on_failover=lambda reason, _: self.losses.append(reason),
        )
        self.watchdog = Watchdog(self.transport, self.replicas)

    async def add(self, *names: str, engine: StreamEngine | None = None) -> None:
        for name in names:
            chosen = engine or self.engine
            server = self.servers[name] = LinkServer(partial(self.submit, chosen), chosen.abort, self.load)
            chosen.listeners.append(partial(self.publish_outputs, server))
            address = await server.listen("127.0.0.1")
            self.metadata[name] = self.describe((address, server.key))
        self.publish(*self.servers)

    def describe(self, link: tuple[str, str]) -> dict[str, Any]:
        """The metadata of a replica that has its link there."""
        return {"info": asdict(self.engine.info), "max_num_seqs": 8, "prefix_cache": True, LINK: link}

    def publish(self, *names: str) -> None:
        self.replicas.publish({name: self.metadata[name] for name in names})

    def kill(self, name: str) -> None:
        """As the kernel ends the links of a process that dies."""
        server = self.servers.pop(name)
        server._server.close()  # type: ignore[union-attr]
        for end in list(server.ends):
            end._transport.abort()

    def submit(self, engine: StreamEngine, request: EngineRequest) -> None:
        self.num_prompt_tokens[request.request_id] = len(request.prompt_token_ids)
        engine.submit(request)

    def publish_outputs(self, server: LinkServer, batch: list[RequestOutputs]) -> None:
        for outputs in batch:
            if (attempt_id := outputs.request_id) in server.attempts and attempt_id not in self.stuck:
                if (length := self.num_prompt_tokens.pop(attempt_id, None)) is not None and outputs.deltas:
                    self.begun.append(length)
                self.num_refusals += isinstance(outputs.error, OverloadedError)
                server.publish([outputs])
                if self.frozen:
                    self.stuck.add(attempt_id)

    def load(self) -> WireLoad:
        return pack_load(self.engine.stats(), 1, None)

    def hosts(self) -> list[str]:
        """The replicas of the running attempts."""
        return [a.replica.replica_id for a in self.replicas.attempts() if a.replica is not None]

    def unsent(self) -> list[Attempt]:
        """The attempts that no replica has heard of."""
        return [attempt for attempt in self.replicas.attempts() if not attempt.is_sent]

    def routable(self) -> list[str]:
        """The replicas to which any request may go."""
        return [replica.replica_id for replica in self.replicas.routable()]

    def in_flight(self) -> dict[str, int]:
        """How many attempts each replica has."""
        return {replica.replica_id: len(replica.attempts) for replica in self.replicas.replicas()}

    def sequences(self) -> dict[str, int]:
        """How many the policy has on each replica's account."""
        return {name: replica.sequences for name, replica in self.policy._replicas.items()}


@asynccontextmanager
async def running(engine: StreamEngine) -> AsyncIterator[Fleet]:
    fleet = Fleet(engine)
    watching = asyncio.create_task(fleet.watchdog.run())
    yield fleet
    for server in fleet.servers.values():
        server.close()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture
async def fleet(tiny_engine: StreamEngine) -> AsyncIterator[Fleet]:
    async with running(tiny_engine) as fleet:
        yield fleet


@pytest.fixture
async def small_engines() -> AsyncIterator[list[StreamEngine]]:
    """Two engines with two slots and one queue entry each."""
    config = EngineConfig(max_num_seqs=2, max_num_waiting=1, max_num_batched_tokens=64, kv_cache_gib=0.1)

    def build() -> EngineCore:
        return EngineCore(loader.from_module(tiny_model("llama", torch.float64), max_model_len=512), config)

    engines = [await StreamEngine.start_with(build) for _ in range(2)]
    yield engines
    for engine in engines:
        await engine.shutdown()


def numbered(number: int) -> EngineRequest:
    """A request that has a prompt of its own for each number, and takes the longer the higher it
    is."""
    params = replace(REQUEST.params, max_tokens=20 + 2 * number)
    prompt = (*range(number), *REQUEST.prompt_token_ids)
    return replace(REQUEST, request_id=f"r{number}", prompt_token_ids=prompt, params=params)


def attempt(reserved: Replica | None = None) -> Attempt:
    return Attempt("early", REQUEST, since=0.0, deadline=1e9, reserved=reserved)


async def tokens(fleet: Fleet, number: int = 0) -> list[int]:
    (choice,) = await told(fleet.failover, numbered(number))
    return choice.token_ids


async def expected(engine: StreamEngine, number: int = 0) -> list[int]:
    return [i async for deltas in engine.generate(numbered(number)) for delta in deltas for i in delta.token_ids]


async def test_a_request_waits_for_a_link_and_says_what_the_engine_says(fleet: Fleet) -> None:
    early = asyncio.create_task(tokens(fleet))
    await asyncio.sleep(0.01)
    assert not early.done()
    await fleet.add("a")
    assert await early == await expected(fleet.engine)
    assert fleet.losses == []
    assert fleet.sequences() == {"a": 0}
    assert fleet.in_flight() == {"a": 0}


async def test_a_shared_prefix_goes_to_one_replica_and_the_accounts_know_it(fleet: Fleet) -> None:
    await fleet.add("a", "b")
    fleet.frozen = True
    first = asyncio.create_task(tokens(fleet))
    await until(lambda: bool(fleet.hosts()))
    second = asyncio.create_task(tokens(fleet))
    await until(lambda: len(fleet.hosts()) == 2)
    assert len(set(fleet.hosts())) == 1
    assert sorted(fleet.sequences().values()) == [0, 2]
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert set(fleet.sequences().values()) == {0}
    await until(lambda: not any(server.attempts for server in fleet.servers.values()))


async def test_those_who_wait_are_spread_whoever_is_heard_first(fleet: Fleet) -> None:
    fleet.frozen = True
    waiting = [asyncio.create_task(tokens(fleet, number)) for number in range(16)]
    await asyncio.sleep(0.01)
    await fleet.add("a", "b")
    await until(lambda: len(fleet.hosts()) == 16)
    assert Counter(fleet.hosts()) == {"a": 8, "b": 8}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert set(fleet.sequences().values()) == {0}
    assert fleet.in_flight() == {"a": 0, "b": 0}


async def test_a_replica_that_never_says_a_word_is_lost_with_what_waits_for_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "_OPENING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        fleet.metadata["a"] = fleet.describe((f"127.0.0.1:{mute.getsockname()[1]}", "0" * 32))
        fleet.publish("a")
        task = asyncio.create_task(tokens(fleet))
        await until(lambda: "a" not in fleet.routable())
        await fleet.add("b")
        assert await task == await expected(fleet.engine)
    assert set(fleet.losses) == {LossReason.REFUSED}, "it was never sent, so nobody died of it"


async def test_a_replica_that_cannot_be_understood_gets_nothing_and_is_named_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    came = 0

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.write(b"serve-app-link/1\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    fleet.metadata["a"] = fleet.describe((f"127.0.0.1:{other.sockets[0].getsockname()[1]}", "0" * 32))
    fleet.metadata |= {"b": {}, "c": fleet.describe(("127.0.0.1:1", "0" * 32)) | {LINK: "an address"}}
    fleet.publish("a", "b", "c")
    task = asyncio.create_task(tokens(fleet))
    await until(lambda: not fleet.routable())
    lines = sorted(caplog.messages)
    assert [line.split()[1] for line in lines] == ["b", "c", "replica"]
    for _ in range(5):
        fleet.watchdog.tick()
        await asyncio.sleep(0)
    assert came == 1
    assert sorted(caplog.messages) == lines
    await fleet.add("d")
    fleet.publish("a", "b", "c", "d")
    assert await task == await expected(fleet.engine)
    await until(lambda: fleet.routable() == ["d"])
    assert errors == []
    other.close()


async def test_a_clock_that_jumps_by_an_hour_changes_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = cycle((3600.0, -3600.0, 0.0))
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + next(jumps))
    await fleet.add("a", "b")
    answers = await asyncio.gather(*(tokens(fleet, number) for number in range(4)))
    assert answers == [await expected(fleet.engine, number) for number in range(4)]
    fleet.watchdog.tick()
    ages = [time.monotonic() - load.at for load in fleet.replicas.loads().values()]
    assert len(ages) == 2
    assert all(0.0 <= age < 1800.0 for age in ages)
    assert fleet.routable() == ["a", "b"]
    assert fleet.losses == []


async def test_a_session_stays_with_unlike_prompts(fleet: Fleet) -> None:
    await fleet.add("a", "b")
    homes = set()
    for number in range(3):
        request = replace(REQUEST, prompt_token_ids=tuple(range(60 * number, 60 * number + 9)))
        visited: list[str] = []
        async for _ in fleet.failover.generate(request, deadline=1e9, session="s", visited=visited):
            pass
        homes.update(visited)
    assert len(homes) == 1


async def test_a_suspect_gets_nothing_though_it_has_the_prefix(fleet: Fleet) -> None:
    await fleet.add("a", "b")
    visited: list[str] = []
    async for _ in fleet.failover.generate(REQUEST, deadline=1e9, visited=visited):
        pass
    (home,) = visited
    fleet.replicas.suspect(home, "stalled")
    async for _ in fleet.failover.generate(REQUEST, deadline=1e9, visited=visited):
        pass
    assert visited[1] != home


async def test_an_attempt_with_a_reservation_waits_for_its_replica_and_holds_up_no_other(fleet: Fleet) -> None:
    await fleet.add("a", "b")
    fleet.replicas.reserve("b")
    held = attempt(reserved=fleet.replicas.get("b"))
    fleet.publish("a")
    fleet.transport.start(held)
    assert await tokens(fleet) == await expected(fleet.engine)
    assert held.replica is None
    fleet.publish("a", "b")
    assert await asyncio.wait_for(held.next(), 20)
    assert held.replica is not None
    assert held.replica.replica_id == "b"
    fleet.transport.stop(held)
    fleet.transport.stop(held)
    assert fleet.in_flight() == {"a": 0, "b": 0}


async def test_who_waits_for_a_revision_holds_up_no_other(fleet: Fleet) -> None:
    await fleet.add("a")
    fleet.metadata["a"]["revision"] = "new"
    fleet.publish("a")
    held = Attempt("old", REQUEST, since=0.0, deadline=1e9, revision="old")
    fleet.transport.start(held)
    assert await tokens(fleet) == await expected(fleet.engine)
    assert held.replica is None
    fleet.metadata["b"] = fleet.metadata["a"] | {"revision": "old"}
    fleet.publish("a", "b")
    assert await asyncio.wait_for(held.next(), 20)
    fleet.transport.stop(held)


async def test_who_waits_for_room_is_not_overtaken_by_who_could_use_it(fleet: Fleet) -> None:
    fleet.frozen = True
    await fleet.add("a")
    running = [asyncio.create_task(tokens(fleet, number)) for number in range(8)]
    await until(lambda: len(fleet.hosts()) == 8)
    moved = Attempt("moved", REQUEST, since=0.0, deadline=1e9, needs_slot=True)
    fleet.transport.start(moved)
    late = asyncio.create_task(tokens(fleet, 9))
    await until(lambda: len(fleet.replicas.waiting) == 2)
    running[0].cancel()
    await until(lambda: moved.replica is not None)
    assert moved.replica is fleet.replicas.get("a")
    fleet.transport.stop(moved)
    for task in (*running, late):
        task.cancel()
    await asyncio.gather(*running, late, return_exceptions=True)


async def test_an_attempt_that_is_let_go_before_it_was_placed_never_runs(fleet: Fleet) -> None:
    early = attempt()
    fleet.transport.start(early)
    fleet.transport.stop(early)
    await fleet.add("a")
    assert await tokens(fleet) == await expected(fleet.engine)
    assert early.replica is None


async def test_a_stream_goes_on_where_a_link_broke(fleet: Fleet) -> None:
    await fleet.add("a")
    fleet.frozen = True
    task = asyncio.create_task(tokens(fleet))
    await until(lambda: any(attempt._has_started for attempt in fleet.replicas.attempts()))
    fleet.frozen = False
    await fleet.add("b")
    await until(lambda: len(fleet.transport._links) == 2)
    fleet.transport._links["a"].close()
    assert await task == await expected(fleet.engine)
    assert fleet.losses == [LossReason.UNAVAILABLE]


async def test_who_is_not_known_has_left_and_who_does_not_answer_is_unavailable(fleet: Fleet) -> None:
    with pytest.raises(ReplicaLostError) as caught:
        await fleet.transport.listen("a", lambda _: None)
    assert caught.value.reason is LossReason.LEFT
    fleet.replicas.publish({"a": fleet.describe(("127.0.0.1:1", "key"))})
    with pytest.raises(ReplicaLostError) as caught:
        await fleet.transport.listen("a", lambda _: None)
    assert caught.value.reason is LossReason.UNAVAILABLE


async def test_those_whom_a_dead_replica_leaves_get_the_others_room_in_order(
    fleet: Fleet, small_engines: list[StreamEngine]
) -> None:
    expectations = [await expected(small_engines[0], number) for number in range(10, 19)]
    for name, engine in zip("ab", small_engines, strict=True):
        await fleet.add(name, engine=engine)
    tasks = [asyncio.create_task(tokens(fleet, number)) for number in range(10, 16)]
    await until(lambda: len(fleet.hosts()) == 6)
    assert Counter(fleet.hosts()) == {"a": 3, "b": 3}
    await until(lambda: not fleet.unsent())
    lengths = {len(a.request.prompt_token_ids): a.replica for a in fleet.replicas.attempts()}
    lost = sorted(length for length, replica in lengths.items() if replica is fleet.replicas.get("a"))
    fleet.kill("a")
    killed_at = time.monotonic()
    await until(lambda: fleet.num_refusals == len(fleet.unsent()) == 3)
    fleet.begun.clear()
    tasks += [asyncio.create_task(tokens(fleet, number)) for number in range(16, 19)]
    assert await asyncio.gather(*tasks) == expectations
    kept = lengths.keys() - lost
    assert [length for length in fleet.begun if length not in kept] == [*lost, *range(136, 139)], "the oldest first"
    assert fleet.losses == [LossReason.UNAVAILABLE] * 3
    assert fleet.num_refusals <= 3 + (time.monotonic() - killed_at), "then one in a second"
    assert fleet.sequences()["b"] == 0


async def test_room_that_another_ingress_leaves_is_found(fleet: Fleet, small_engines: list[StreamEngine]) -> None:
    other = Fleet(fleet.engine)
    await other.add("a", engine=small_engines[0])
    fleet.metadata = other.metadata
    fleet.publish("a")
    engine = small_engines[0]
    filling = [asyncio.create_task(expected(engine, number)) for number in range(20, 23)]
    await until(lambda: engine.stats().running + engine.stats().waiting == 3)
    started_at = time.monotonic()
    waiting = asyncio.create_task(tokens(fleet))
    await until(lambda: other.num_refusals == 1)
    await asyncio.gather(*filling)
    assert await waiting == await expected(engine)
    assert other.num_refusals <= 1 + (time.monotonic() - started_at)
    other.servers["a"].close()


@pytest.mark.parametrize("bad", [{"prompt_token_ids": (2**70,) * 40}, {"priority": 2**70}], ids=["rank", "send"])
async def test_a_request_that_cannot_be_placed_fails_alone_and_leaves_nothing(
    fleet: Fleet, bad: dict[str, Any]
) -> None:
    broken = asyncio.create_task(told(fleet.failover, replace(REQUEST, **bad)))
    await asyncio.sleep(0)
    good = asyncio.create_task(tokens(fleet))
    await asyncio.sleep(0)
    await fleet.add("a")
    with pytest.raises((struct.error, OverflowError)):
        await broken
    assert await good == await expected(fleet.engine)
    assert fleet.sequences() == {"a": 0}
    assert fleet.in_flight() == {"a": 0}
    assert not fleet.replicas.attempts()


async def test_what_is_let_go_while_its_link_opens_is_forgotten(fleet: Fleet) -> None:
    fleet.metadata["a"] = fleet.describe(("127.0.0.1:1", "0" * 32))
    fleet.publish("a")
    await asyncio.sleep(0)
    early = attempt()
    fleet.transport.start(early)
    assert fleet.in_flight() == {"a": 1}
    fleet.transport.stop(early)
    gone = weakref.ref(early)
    del early
    gc.collect()
    assert gone() is None
    assert fleet.sequences() == {"a": 0}


class Slots:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def release(self) -> None:
        self.calls.append("release")

    def reclaim(self) -> None:
        self.calls.append("reclaim")


async def test_a_stream_that_is_not_read_is_computed_no_further_and_goes_on_with_its_reader(fleet: Fleet) -> None:
    subject = replace(REQUEST, params=replace(REQUEST.params, max_tokens=130, logprobs=20, temperature=1.0))
    num_items = 0

    running: dict[str, asyncio.Task[None]] = {}

    def submit(request: EngineRequest) -> None:
        running[request.request_id] = asyncio.create_task(one_at_a_time(request))

    async def one_at_a_time(request: EngineRequest) -> None:
        nonlocal num_items
        async with aclosing(one_by_one(fleet.engine, request)) as deltas:
            async for delta in deltas:
                num_items += 1
                ended = delta.finish_reason is not None
                server.publish([RequestOutputs(request.request_id, [delta], ended)])
                await asyncio.sleep(0.001)

    def abort(request_id: str) -> None:
        running[request_id].cancel()

    server = fleet.servers["a"] = LinkServer(submit, abort, fleet.load)
    fleet.metadata["a"] = fleet.describe((await server.listen("127.0.0.1"), server.key))
    fleet.publish("a")
    (whole,) = await told(fleet.failover, subject)
    fleet.failover.unread = unread = UnreadBytes(max_stream_bytes=20_000)
    num_items = 0
    slots = Slots()
    stream = fleet.failover.generate(subject, deadline=1e9, slots=slots)
    deltas = await anext(stream)
    await until(lambda: fleet.in_flight() == {"a": 0} and not server.attempts)
    assert slots.calls == ["release"]
    assert num_items < 65
    assert 20_000 < unread.held < 40_000
    async for more in stream:
        deltas += more
        await asyncio.sleep(0.01)
    assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == whole.logprobs
    assert set(fleet.losses) == {LossReason.UNREAD}
    # The attempt that had the last token may have been one too much: nothing is to be continued
    # then.
    in_turns = ["release", "reclaim"] * len(fleet.losses)
    assert slots.calls in (in_turns, [*in_turns, "release"])
    assert unread.held == 0
    assert fleet.sequences() == {"a": 0}
