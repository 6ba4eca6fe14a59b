"""The engine for a server: the step loop in its own thread, with outputs in batches per flush.

Decides how requests and outputs cross between the two threads, which outputs are delayed, and what
clients see when the engine ends. There are two crossings: an inbox of commands (event loop to
engine), emptied before each step; and the outputs (engine to event loop), published by a flush. The
event loop is woken only for outputs that cannot wait for the next flush, just before the next
step's model runs: earlier, the two threads would compete for the GIL. Grammars are built in other
threads before their requests enter the inbox (`EngineCore.prepare`).
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import RequestOutputs, TokenDelta, join_deltas
from serve_app.core.step_record import SchedulerStats
from serve_app.engine.core import EngineCore, ModelInfo
from serve_app.errors import (
    ENGINE_DIED,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve_app.system.cpu_priority import share_cpu_normally

logger = logging.getLogger(__name__)

# Invariants are checked after the engine has been idle for this long. For a large pool the check
# takes tens of milliseconds, which must not delay a request.
_IDLE_BEFORE_CHECK_S = 1.0

# The message for clients. The cause, which may contain paths, is in the log and in
# `EngineHealth.error`.
_DIED = "the engine died; the server's log has the cause"

# With up to `_FEW` running sequences, each step is flushed. The flush interval grows with their
# number, and is full from `_MANY` on: every event takes time from the cores that the model uses.
_FEW, _MANY = 2, 16

Publish = Callable[[list[RequestOutputs]], None]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the loop is alive, and its progress. `last_step_age_s` is None while it is idle."""

    alive: bool
    last_step_age_s: float | None
    error: str | None


@dataclass(slots=True, eq=False)
class _Stream:
    """One request in the engine. Passed to the engine's thread, and back with each output."""

    request_id: str
    num_unfinished: int
    """Choices that have not finished."""
    waits_since: float | None
    """Submission time; None once the first token has come."""
    is_over: bool = False


class AsyncEngine:
    """The engine with an asynchronous interface. Not thread-safe.

    Use it on the event loop that created it, after `start`.
    """

    info: ModelInfo

    def __init__(
        self,
        build: Callable[[], EngineCore],
        *,
        stream_interval_s: float = 0.0,
        on_first_token: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`build` creates the core in the engine's thread.

        `stream_interval_s`: time between flushes with many sequences; the first and last output of
        a choice are flushed at once. `on_first_token` gets the seconds from submission to the first
        token.
        """
        self._build = build
        self._stream_interval_s = stream_interval_s
        self._on_first_token = on_first_token
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        # Filled by the engine's thread, emptied by flushes.
        self._outputs: deque[list[tuple[_Stream, TokenDelta]]] = deque()
        self._next_flush: asyncio.TimerHandle | None = None
        self._flush_is_due = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._error: str | None = None
        # Owned by the engine's thread. The event loop only reads whole values.
        self._core: EngineCore
        self._in_core: dict[str, _Stream] = {}
        """The streams of all requests in the core, including waiting ones."""
        self._step_outputs: list[tuple[_Stream, TokenDelta]] = []
        self._stats: SchedulerStats
        self._busy_since: float | None = None
        self._checked = True

    async def start(self, publish: Publish) -> None:
        """Build the core and start the loop. Raises what `build` raises.

        `publish` gets the outputs of all requests since the last flush. Deltas of several steps are
        joined into one per choice.
        """
        self._publish = publish
        self._thread.start()
        try:
            await self._ready
        except asyncio.CancelledError:
            self._stopping = True
            raise

    def submit(self, request: EngineRequest) -> None:
        """Run the request.

        Its outputs are published until all choices have finished or an error ends it. Published
        errors: `InvalidRequestError`, `ContextLengthError` and `OverloadedError` if the engine
        refuses the request; `UnavailableError` on shutdown; `EngineError` if the engine dies.
        Raises `InvalidRequestError` if the id is in use, and `UnavailableError` if the engine has
        ended.
        """
        if self._error is not None or self._stopping:
            raise UnavailableError("the engine is shutting down" if self._error is None else _DIED)
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        # Choices that an earlier replica finished end too: the scheduler reports them again.
        stream = self._streams[request_id] = _Stream(request_id, request.params.n, self._core.clock())
        if request.params.grammar is None:
            self._post(lambda: self._add(request, stream))
        else:
            self._loop.run_in_executor(None, self._prepare, request, stream)

    def abort(self, request_id: str) -> None:
        """End the request and publish nothing more of it. Ignores unknown ids."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            stream.is_over = True
            self._post(lambda: self._remove(request_id))

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Change the scheduler's knobs before the next step.

        Raises `ConfigError` for changes that need a restart.
        """
        self._core.config.check_change(knobs)
        self._post(lambda: self._core.reconfigure(knobs))

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state after the last step or command."""
        return self._stats

    def health(self) -> EngineHealth:
        """Return whether the loop is alive, and how long its step or oldest command has lasted."""
        alive, since = self._thread.is_alive() and self._error is None, self._busy_since
        age = max(0.0, self._core.clock() - since) if alive and since is not None else None
        return EngineHealth(alive, age, self._error)

    async def shutdown(self) -> None:
        """Stop after the step in flight. Running requests get `UnavailableError`. Idempotent."""
        self._stopping = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._fail(self._streams.values(), UnavailableError("the engine was shut down"))

    # Methods for the event loop's thread.

    def _post(self, command: Callable[[], None]) -> None:
        """Run `command` in the engine's thread before its next step.

        Counts as busy from now on, so that a thread that never wakes is detected as stalled.
        """
        self._busy_since = self._busy_since or self._core.clock()
        self._inbox.put(command)

    def _fail(self, streams: Iterable[_Stream], error: RequestError) -> None:
        self._flush()
        failed = [stream.request_id for stream in streams if not stream.is_over]
        for request_id in failed:
            self.abort(request_id)
        self._publish([RequestOutputs(request_id, [], ended=True, error=error) for request_id in failed])

    def _flush(self) -> None:
        """Publish all outputs now, and schedule the next flush."""
        self._flush_is_due = False
        if self._next_flush is not None:
            self._next_flush.cancel()
        interval_s = self._stream_interval_s * min(1.0, (self._stats.running - _FEW) / (_MANY - _FEW))
        waits = self._outputs and interval_s > 0
        self._next_flush = self._loop.call_later(interval_s, self._flush) if waits else None
        gathered: dict[_Stream, list[TokenDelta]] = {}
        while self._outputs:
            for stream, delta in self._outputs.popleft():
                if not stream.is_over:
                    gathered.setdefault(stream, []).append(delta)
        if gathered:
            self._publish([self._take(stream, deltas) for stream, deltas in gathered.items()])

    def _take(self, stream: _Stream, deltas: list[TokenDelta]) -> RequestOutputs:
        """Return the stream's part of a flush, and update the stream."""
        deltas = join_deltas(deltas)
        if stream.waits_since is not None and any(delta.token_ids for delta in deltas):
            self._on_first_token(self._core.clock() - stream.waits_since)
            stream.waits_since = None
        for delta in deltas:
            stream.num_unfinished -= delta.finish_reason is not None
        if not stream.num_unfinished:
            self.abort(stream.request_id)
        return RequestOutputs(stream.request_id, deltas, not stream.num_unfinished)

    def _started(self, error: BaseException | None) -> None:
        if error is not None and not self._ready.cancelled():
            self._ready.set_exception(error)
        elif not self._ready.cancelled():
            self._ready.set_result(None)

    # Methods for the engine's thread.

    def _run(self) -> None:
        share_cpu_normally()
        try:
            self._core = self._build()
            self.info = self._core.info
            self._stats = self._core.stats()
        except Exception as error:
            self._hand_over(self._started, error)
            return
        self._hand_over(self._started, None)
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # a panic in a Rust library is not an Exception
            logger.exception("the engine died")
            self._error = f"the engine died: {type(error).__name__}: {error}"
            self._hand_over_outputs()
            self._hand_over(self._fail, self._streams.values(), EngineError(_DIED, code=ENGINE_DIED))

    def _turn(self) -> None:
        """Run the inbox's commands, then one step; or sleep until a command or `wake_time`."""
        core = self._core
        while not self._inbox.empty():
            self._inbox.get()()
        self._stats = core.stats()
        if not core.has_unfinished:
            self._hand_over_outputs()
            if self._checked:
                self._sleep(None)
            elif not self._sleep(core.clock() + _IDLE_BEFORE_CHECK_S):
                self._checked = True
                core.check_invariants()
            return
        self._checked = False
        self._busy_since = core.clock()
        deltas = core.step(on_scheduled=self._hand_over_outputs)
        self._stats = core.stats()
        if deltas is None:
            self._sleep(core.wake_time)
        else:
            self._step_outputs = [(self._in_core[delta.request_id], delta) for delta in deltas]

    def _sleep(self, until: float | None) -> bool:
        """Wait for a command until `until`, and run it. Returns whether one came."""
        self._busy_since = None
        timeout = None if until is None else max(0.0, until - self._core.clock())
        try:
            command = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return False
        command()
        return True

    def _hand_over_outputs(self) -> None:
        """Schedule a flush of the last step's outputs, unless a flush is planned soon enough."""
        outputs, self._step_outputs = self._step_outputs, []
        if outputs:
            # Before the plan is read: a flush changes the plan before it takes outputs.
            self._outputs.append(outputs)
            if self._flush_is_due or (self._next_flush and not any(_cannot_wait(delta) for _, delta in outputs)):
                return
            self._flush_is_due = True
            self._hand_over(self._flush)

    def _add(self, request: EngineRequest, stream: _Stream) -> None:
        stats, config = self._core.stats(), self._core.config
        with self._ending(stream):
            if stream.is_over:
                return
            if stats.waiting + stats.running >= config.max_num_seqs + config.max_num_waiting:
                raise OverloadedError(f"the engine already holds {stats.waiting} waiting requests")
            self._core.add(request)
            self._in_core[request.request_id] = stream

    def _remove(self, request_id: str) -> None:
        self._in_core.pop(request_id, None)
        self._core.abort(request_id)

    def _prepare(self, request: EngineRequest, stream: _Stream) -> None:
        """Build the request's grammar in another thread, then pass the request to the engine."""
        with self._ending(stream):
            self._core.prepare(request)
            self._post(lambda: self._add(request, stream))

    @contextmanager
    def _ending(self, stream: _Stream) -> Iterator[None]:
        """End the stream on any error raised in this context."""
        try:
            yield
        except RequestError as error:
            self._hand_over(self._fail, [stream], error)
        except Exception:
            logger.exception("taking request %r failed", stream.request_id)
            self._hand_over(self._fail, [stream], EngineError("the engine could not accept the request"))

    def _hand_over(self, callback: Callable[..., object], *args: object) -> None:
        """Run `callback` on the event loop. If the loop is closed, the engine ends."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping = True


def _cannot_wait(delta: TokenDelta) -> bool:
    """Whether `delta` is the first or last of its choice here."""
    return delta.offset == 0 or delta.num_cached_tokens is not None or delta.finish_reason is not None
