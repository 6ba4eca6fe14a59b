"""From the engine's steps to its ingresses: one batch per flush says what a queue for each stream
would say."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests.bench.stub_engine import StubCore
from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, FinishReason, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.async_engine import AsyncEngine
from serve_app.engine.core import EngineCore
from serve_app.fleet.link import LinkServer
from serve_app.fleet.loss import ReplicaLostError
from serve_app.fleet.wire import pack_request, unpack_item
from tests.examples import examples
from tests.fleet.links import LOAD, Ingress, Replica
from tests.fleet.replicas import until

_ENDLESS = 10**6


class ScriptedCore(StubCore):
    """Takes a step when it may, and remembers what each request gained: as much as its queue would
    hold."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0)
        self.may_step = threading.Semaphore(0)
        self.is_free = False
        self.gained: dict[str, list[TokenDelta]] = {}
        self.running: dict[str, EngineRequest] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add(self, request: EngineRequest) -> None:
        self.running[request.request_id] = request
        self.gained[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def step(self, on_scheduled: Any) -> list[TokenDelta]:
        on_scheduled()
        if not self.is_free:
            self.may_step.acquire(timeout=20)
        return [delta for request in list(self.running.values()) for delta in self._grow(request)]

    def _grow(self, request: EngineRequest) -> list[TokenDelta]:
        """A token for each choice: of choice 1 a step later, and of longer choices to a later
        end."""
        name, gained = request.request_id, self.gained[request.request_id]
        news = []
        for choice in range(request.params.n):
            offset = sum(delta.choice == choice for delta in gained)
            most = (request.params.max_tokens or 1) + choice
            if offset < most and (choice == 0 or len(gained) > 0):
                reason = FinishReason.LENGTH if offset == most - 1 else None
                token = 100 * choice + offset
                results = {LOGPROBS: ((token, -0.5, ()),)} if request.params.logprobs is not None else {}
                news.append(TokenDelta(name, choice, offset, (token,), reason, None if offset else 0, None, results))
        gained += news
        if [delta.finish_reason for delta in gained].count(FinishReason.LENGTH) == request.params.n:
            self.abort(name)
        return news


@dataclass
class Stream:
    """One reader's: what came for it, and whether it had to come to its end."""

    link: Ingress
    is_endless: bool
    items: list[Any] = field(default_factory=list)
    was_aborted: bool = False

    def gained(self, name: str) -> list[TokenDelta]:
        return [delta for item in self.items if isinstance(item, tuple | list) for delta in unpack_item(name, item)]

    @property
    def has_ended(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1], ReplicaLostError)


@dataclass
class Play:
    """An engine behind three links, which actions of a script start streams on, abort and lose."""

    core: ScriptedCore
    replica: Replica
    links: dict[int, Ingress] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)

    async def start(self, number: int, n: int, max_tokens: int, logprobs: int | None) -> None:
        if number not in self.links:
            self.links[number] = await Ingress.open(self.replica)
        name = f"{len(self.streams)}.1"
        stream = self.streams[name] = Stream(self.links[number], max_tokens == _ENDLESS)
        params = SamplingParams(n=n, max_tokens=max_tokens, logprobs=logprobs)
        stream.link.link.start(pack_request(EngineRequest(name, (5, 6), params), name), stream.items.append)

    async def abort(self, number: int) -> None:
        if self.streams:
            self._abort(list(self.streams)[number % len(self.streams)])

    def _abort(self, name: str) -> None:
        self.streams[name].was_aborted = True
        self.streams[name].link.link.cancel(name)

    async def lose(self, number: int) -> None:
        if (lost := self.links.pop(number, None)) is not None:
            lost.link.close()

    async def lose_all(self) -> None:
        for end in list(self.replica.server.ends):
            end.abort()
        self.links.clear()

    async def steps(self, number: int) -> None:
        for _ in range(number):
            self.core.may_step.release()
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Let the engine run until nothing is left to do. Endless streams of lost links are for the
        replica to end."""
        for name, stream in self.streams.items():
            if stream.is_endless and not stream.link.link.lost.done():
                self._abort(name)
        self.core.is_free = True
        self.core.may_step.release()
        await until(lambda: all(stream.was_aborted or stream.has_ended for stream in self.streams.values()))
        await until(lambda: not self.core.running and not self.replica.server.attempts)

    def check(self) -> None:
        for name, stream in self.streams.items():
            gained, said = stream.gained(name), self.core.gained.get(name, [])
            for choice in range(2):
                came = [delta for delta in gained if delta.choice == choice]
                made = [delta for delta in said if delta.choice == choice]
                tokens = [token for delta in came for token in delta.token_ids]
                assert [delta.offset for delta in came] == [tokens.index(delta.token_ids[0]) for delta in came]
                assert tokens == [token for delta in made for token in delta.token_ids][: len(tokens)]
                assert [entry for delta in came for entry in delta.logprobs] == [
                    entry for delta in made for entry in delta.logprobs
                ][: len(tokens)]
                assert all(delta.finish_reason is None for delta in came[:-1])
                # as said at the end of a whole answer
                if not stream.was_aborted and str(stream.items[-1]) == "cut":
                    assert len(tokens) == len(made)
                    assert not came or came[-1].finish_reason is FinishReason.LENGTH
            ends = [item for item in stream.items if isinstance(item, ReplicaLostError)]
            assert ends == [] if stream.was_aborted and not stream.has_ended else ends == stream.items[-1:]


_START = st.tuples(
    st.just("start"),
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 8) | st.just(_ENDLESS),
    st.sampled_from([None, 0]),
)
_ABORT = st.tuples(st.just("abort"), st.integers(0, 40))
_LOSE = st.tuples(st.just("lose"), st.integers(0, 2)) | st.tuples(st.just("lose_all"))
_STEPS = st.tuples(st.just("steps"), st.integers(1, 5))


@settings(max_examples=examples(60))
@given(st.lists(_START | _STEPS | _ABORT | _LOSE, max_size=40), st.sampled_from([0.0, 0.003]))
def test_each_stream_gets_what_its_own_queue_would_hold(script: list[tuple[Any, ...]], interval_s: float) -> None:
    async def run() -> None:
        core, replica = ScriptedCore(), Replica()
        engine = AsyncEngine(lambda: cast(EngineCore, core), stream_interval_s=interval_s)
        replica.server = LinkServer(engine.submit, engine.abort, lambda: LOAD)
        await engine.start(replica.server.publish)
        replica.address = await replica.server.listen("127.0.0.1")
        play = Play(core, replica)
        for name, *arguments in script:
            await getattr(play, name)(*arguments)
        await play.finish()
        play.check()
        assert not engine._streams
        for ingress in play.links.values():
            ingress.link.close()
        replica.server.close()
        await engine.shutdown()
        assert not engine._in_core

    asyncio.run(run())
