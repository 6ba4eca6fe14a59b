"""Replicas in this process: engines behind the interface that failover knows, with faults on
demand."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta, TokenLogprob
from serve_app.errors import RequestError
from serve_app.fleet.attempt import Attempt
from serve_app.fleet.failover import Failover
from serve_app.fleet.link import OnHeartbeat
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.wire import WireLoad, WireRequest, pack_deltas, pack_request, unpack_request
from tests.engine.streams import StreamEngine

FAR = 1e9
"""A deadline that never comes."""


@dataclass
class Fault:
    """What becomes of one attempt after so many items: a loss, an error of the request, or (None)
    silence."""

    items: int
    outcome: LossReason | RequestError | None


@dataclass
class Observer:
    """Remembers which attempts were started, with how many cached tokens, and which were refused
    and ended."""

    starts: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


@dataclass
class Account:
    """`Placement` that tells an observer."""

    observer: Observer
    attempt_id: str

    def started(self, num_cached_tokens: int) -> None:
        self.observer.starts[self.attempt_id] = num_cached_tokens

    def refused(self, now: float) -> None:
        self.observer.refusals.append(self.attempt_id)

    def ended(self) -> None:
        self.observer.ends.append(self.attempt_id)


class Fleet:
    """A transport to engines by name. `faults` are for the attempts to come, in order; None = none
    for that one."""

    def __init__(self, engines: dict[str, StreamEngine], *, wait_s: float = 5.0) -> None:
        self.engines = engines
        self.replicas = ReplicaSet()
        self.replicas.publish({name: {} for name in engines})
        self.faults: list[Fault | None] = []
        self.placed: list[tuple[str, str]] = []
        """(attempt id, replica) in order."""
        self.requests: list[WireRequest] = []
        self.losses: list[tuple[LossReason, int]] = []
        self.num_hanging = 0
        """Streams that have fallen silent."""
        self._hearts: dict[str, asyncio.Queue[WireLoad | LossReason]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.observer = Observer()
        self.failover = Failover(
            self,
            self.replicas,
            wait_s=wait_s,
            on_failover=lambda reason, tokens: self.losses.append((reason, tokens)),
        )

    def start(self, attempt: Attempt) -> None:
        data = travelled(pack_request(attempt.request, attempt.attempt_id))
        self.requests.append(data)
        self.replicas.begin(attempt)
        attempt.placement = Account(self.observer, attempt.attempt_id)
        candidates = [replica.replica_id for replica in self.replicas.candidates(attempt)]
        allowed = [name for name in self.engines if name in candidates]
        fault = self.faults.pop(0) if self.faults else None
        if allowed:
            name = min(allowed, key=self.in_flight)
            self.replicas.place(attempt, name)
            self.placed.append((attempt.attempt_id, name))
            run = self._run(attempt, self.engines[name], data, fault)
            self._running[attempt.attempt_id] = asyncio.create_task(run)

    def stop(self, attempt: Attempt) -> None:
        self.replicas.end(attempt)
        assert attempt.placement is not None
        attempt.placement.ended()
        if (running := self._running.pop(attempt.attempt_id, None)) is not None:
            running.cancel()

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        while True:
            beat = await self.heart(replica_id).get()
            if isinstance(beat, LossReason):
                raise ReplicaLostError(beat)
            on_heartbeat(beat)

    def account(self, replica_id: str) -> dict[str, float | None]:
        return {}

    def heart(self, replica_id: str) -> "asyncio.Queue[WireLoad | LossReason]":
        """What its links say: a load, or why they end."""
        return self._hearts.setdefault(replica_id, asyncio.Queue())

    def routable(self) -> list[str]:
        """The replicas to which any request may go."""
        return [replica.replica_id for replica in self.replicas.routable()]

    def in_flight(self, replica_id: str) -> int:
        """Attempts on the replica, now."""
        replica = self.replicas.get(replica_id)
        return 0 if replica is None else len(replica.attempts)

    def attempt(self, attempt_id: str) -> Attempt:
        """One that runs."""
        [found] = [attempt for attempt in self.replicas.attempts() if attempt.attempt_id == attempt_id]
        return found

    async def _run(self, attempt: Attempt, engine: StreamEngine, data: WireRequest, fault: Fault | None) -> None:
        num_items = 0
        async with aclosing(one_by_one(engine, unpack_request(data))) as items:
            try:
                async for item in items:
                    if fault is not None and num_items == fault.items:
                        break
                    num_items += 1
                    attempt.receive(travelled(pack_deltas([item])))
            except RequestError as error:
                attempt.receive(error.to_wire())
        if fault is not None and num_items == fault.items:
            await self._fail(attempt, fault.outcome)

    async def _fail(self, attempt: Attempt, outcome: LossReason | RequestError | None) -> None:
        match outcome:
            case LossReason() as reason:
                attempt.receive(ReplicaLostError(reason))
            case RequestError() as error:
                attempt.receive(error.to_wire())
            case None:
                self.num_hanging += 1
                await asyncio.get_running_loop().create_future()


async def one_by_one(engine: StreamEngine, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
    """Outputs of one token each, however fast the engine runs ahead of the event loop."""
    async with aclosing(engine.generate(request)) as outputs:
        async for deltas in outputs:
            for delta in deltas:
                last = max(0, len(delta.token_ids) - 1)
                for k in range(last + 1):
                    yield delta._replace(
                        offset=delta.offset + k,
                        token_ids=delta.token_ids[k : k + 1],
                        finish_reason=delta.finish_reason if k == last else None,
                        num_cached_tokens=None if k else delta.num_cached_tokens,
                        error=delta.error if k == last else None,
                        results={kind: entries[k : k + 1] for kind, entries in delta.results.items()},
                        prompt_results={} if k else delta.prompt_results,
                    )


def travelled(data: Any) -> Any:
    """What comes out at the other end of a link."""
    return msgpack.unpackb(msgpack.packb(data), use_list=False)


@dataclass
class Told:
    """What the reader of one choice was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


async def told(
    failover: Failover, request: EngineRequest, *, deadline: float = FAR, ended: frozenset[int] = frozenset()
) -> list[Told]:
    """Read `request` to its end; fails if a token comes twice, not at all, or after the end."""
    request = replace(request, request_id=uuid.uuid4().hex)
    choices = [Told() for _ in range(request.params.n)]
    async for deltas in failover.generate(request, deadline=deadline, ended=ended):
        assert deltas
        for delta in deltas:
            choice = choices[delta.choice]
            assert delta.request_id == request.request_id
            assert delta.offset == len(choice.token_ids)
            assert choice.finish_reason is None
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.prompt_logprobs += delta.prompt_logprobs
            choice.cached += [] if delta.num_cached_tokens is None else [delta.num_cached_tokens]
            choice.finish_reason = delta.finish_reason
    return choices


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
