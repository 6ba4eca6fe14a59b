"""Replicas in this process: engines behind the interface that failover knows, with faults on demand."""

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from serve_app.core.output import FinishReason, TokenLogprob
from serve_app.core.request import EngineRequest
from serve_app.engine.async_engine import AsyncEngine
from serve_app.errors import RequestError
from serve_app.serving.attempt import ItemStream, LossReason, OnHeartbeat, ReplicaLostError
from serve_app.serving.failover import Failover
from serve_app.serving.replica_set import ReplicaSet
from serve_app.serving.wire import (
    WireItem,
    WireLoad,
    WireRequest,
    pack_deltas,
    pack_request,
    unpack_request,
)

FAR = 1e9
"""A deadline that never comes."""


@dataclass
class Fault:
    """What becomes of one attempt after so many items: a loss, an error of the request, or (None) silence."""

    items: int
    outcome: LossReason | RequestError | None


@dataclass
class Observer:
    """Remembers which attempts were started, with how many cached tokens, and which were refused and ended."""

    starts: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def started(self, attempt_id: str, num_cached_tokens: int) -> None:
        self.starts[attempt_id] = num_cached_tokens

    def refused(self, attempt_id: str, now: float) -> None:
        self.refusals.append(attempt_id)

    def ended(self, attempt_id: str) -> None:
        self.ends.append(attempt_id)


class Fleet:
    """A transport to engines by name. `faults` are for the attempts to come, in order; None = none for that one."""

    def __init__(self, engines: dict[str, AsyncEngine], *, wait_s: float = 5.0) -> None:
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
        self.observer = Observer()
        self.failover = Failover(
            self,
            self.replicas,
            wait_s=wait_s,
            observer=self.observer,
            on_failover=lambda reason, tokens: self.losses.append((reason, tokens)),
        )

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None, since: float) -> ItemStream:
        # Through JSON, to see that nothing but plain data travels.
        data = json.loads(json.dumps(pack_request(request, attempt_id)))
        self.requests.append(data)
        allowed = self.replicas.routable(self.engines, attempt_id)
        fault = self.faults.pop(0) if self.faults else None
        if not allowed:
            return _Stream(self, None, data, fault)
        name = min(allowed, key=self.replicas.in_flight)
        self.replicas.note_assigned(attempt_id, name)
        self.placed.append((attempt_id, name))
        return _Stream(self, self.engines[name], data, fault)

    async def listen(self, replica_id: str, on_heartbeat: OnHeartbeat) -> None:
        while True:
            news = await self.heart(replica_id).get()
            if isinstance(news, LossReason):
                raise ReplicaLostError(news)
            on_heartbeat(news)

    def heart(self, replica_id: str) -> "asyncio.Queue[WireLoad | LossReason]":
        """What its links say: a load, or why they end."""
        return self._hearts.setdefault(replica_id, asyncio.Queue())


class _Stream:
    def __init__(self, fleet: Fleet, engine: AsyncEngine | None, data: WireRequest, fault: Fault | None) -> None:
        self._items = engine.generate(unpack_request(data)) if engine is not None else None
        self._fleet = fleet
        self._engine = engine
        self._fault = fault
        self._num_items = 0
        self._closing: asyncio.Task[None] | None = None

    async def __anext__(self) -> WireItem:
        if self._items is None or self._engine is None:
            await asyncio.get_running_loop().create_future()
        assert self._items is not None
        assert self._engine is not None
        if self._fault is not None and self._num_items == self._fault.items:
            match self._fault.outcome:
                case LossReason() as reason:
                    raise ReplicaLostError(reason)
                case RequestError() as error:
                    return error.to_wire()
                case None:
                    self._fleet.num_hanging += 1
                    await asyncio.get_running_loop().create_future()
        self._num_items += 1
        try:
            deltas = await anext(self._items)
        except RequestError as error:
            return error.to_wire()
        item: WireItem = json.loads(json.dumps(pack_deltas(deltas)))
        return item

    def cancel(self) -> None:
        if self._items is not None and self._closing is None:
            self._closing = asyncio.create_task(self._items.aclose())


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
