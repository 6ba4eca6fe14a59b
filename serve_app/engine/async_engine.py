"""An engine for a server: the step loop in a thread of its own, an async generator per request on the event loop.

Decides: how requests and outputs cross between the two threads, which outputs wait for more, and what clients see when
the engine ends. Two crossings exist: an inbox of commands (event loop to engine), emptied before each step, and the
outputs (engine to event loop), which the event loop flushes several times a second. It is woken only for outputs that
cannot wait for that, and when the next step's model is about to run: before that the two threads would only compete for
the GIL. Grammars are built in other threads before their requests enter the inbox (`EngineCore.prepare`). Serves one
event loop: the one it was started on.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta, join_deltas
from serve_app.core.step_record import SchedulerStats
from serve_app.engine.core import BATCH_POLL_S, EngineConfig, EngineCore, ModelInfo, OnProgress, OnStep
from serve_app.errors import (
    ENGINE_DIED,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve_app.grammars.token_set import Vocabulary
from serve_app.system.cpu_priority import share_cpu_normally

logger = logging.getLogger(__name__)

# Invariants are checked when the engine has been idle for this long: for a large pool that takes tens of milliseconds,
# which no request should have to wait for.
_IDLE_BEFORE_CHECK_S = 1.0

# What clients read. The cause, which may hold paths, is in the log and in `EngineHealth.error`.
_DIED = "the engine died; the server's log has the cause"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the loop lives and moves. `last_step_age_s` is None while there is nothing to do."""

    alive: bool
    last_step_age_s: float | None
    error: str | None


@dataclass(slots=True, eq=False)
class _Stream:
    """One request on its way through: made by the event loop, passed to the engine, filled by flushes.

    An exception in `outputs` ends it.
    """

    unfinished: set[int]
    outputs: asyncio.Queue[list[TokenDelta] | RequestError] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """Start with `await AsyncEngine.start(config)`; its methods belong to the event loop that did."""

    info: ModelInfo

    def __init__(self, build: Callable[[], EngineCore], stream_interval_s: float) -> None:
        """For `start` and `start_with`. `build` makes the core; it is called in the engine's thread."""
        self._build = build
        self._stream_interval_s = stream_interval_s
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        # Filled by the engine's thread, emptied by flushes.
        self._outputs: deque[tuple[_Stream, list[TokenDelta]]] = deque()
        self._next_flush: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._error: str | None = None
        # Owned by the engine's thread; the event loop reads whole values only.
        self._core: EngineCore
        self._seated: dict[str, _Stream] = {}
        """The streams of all requests that the core has taken, waiting ones included."""
        self._step_outputs: list[tuple[_Stream, list[TokenDelta]]] = []
        self._stats: SchedulerStats
        self._busy_since: float | None = None
        self._checked = True

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_step: OnStep | None = None,
        on_progress: OnProgress | None = None,
        *,
        vocabulary: Callable[[], Vocabulary] | None = None,
        stream_interval_s: float = 0.0,
    ) -> "AsyncEngine":
        """Load the model and start the loop. Raises `ConfigError`. Both callbacks are called in the engine's thread.

        Outputs are flushed at most every `stream_interval_s` seconds, those of several steps joined into one delta per
        choice; but at once when a choice begins or ends.
        """
        build = partial(EngineCore.load, config, on_step=on_step, on_progress=on_progress, vocabulary=vocabulary)
        return await cls.start_with(build, stream_interval_s=stream_interval_s)

    @classmethod
    async def start_with(cls, build: Callable[[], EngineCore], *, stream_interval_s: float = 0.0) -> "AsyncEngine":
        """Start the loop on the core that `build` makes; whatever `build` raises is raised here."""
        engine = cls(build, stream_interval_s)
        engine._thread.start()
        try:
            await engine._ready
        except asyncio.CancelledError:
            engine._stopping = True
            raise
        return engine

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Outputs of the request until all its choices are finished: one item per flush that has any, with one delta
        per choice at most.

        Closing or cancelling the generator aborts the request. Raises on the first step what the engine refuses
        (`InvalidRequestError`, `ContextLengthError`, `OverloadedError`, and `UnavailableError` of an engine that has
        ended); later `UnavailableError` when the engine is shut down and `EngineError` when it dies.
        """
        if self._error is not None or self._stopping:
            raise UnavailableError("the engine is shutting down" if self._error is None else _DIED)
        if request.params.grammar is not None:
            await asyncio.to_thread(self._core.prepare, request)
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        stream = self._streams[request_id] = _Stream(set(range(request.params.n)))
        self._tell(lambda: self._add(request, stream))
        try:
            while stream.unfinished:
                outputs = await stream.outputs.get()
                if isinstance(outputs, RequestError):
                    raise outputs
                stream.unfinished.difference_update(d.choice for d in outputs if d.finish_reason is not None)
                yield outputs
        finally:
            self._end(request_id, stream)

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Change the scheduler's knobs before its next step. Raises `ConfigError` for what only a restart can do."""
        self._core.config.check_change(knobs)
        self._tell(lambda: self._core.reconfigure(knobs))

    def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step or the last command, whichever was later."""
        return self._stats

    def health(self) -> EngineHealth:
        """Whether the loop lives, and how long its current step, or a request's way to it, has been going on."""
        alive, since = self._thread.is_alive() and self._error is None, self._busy_since
        age = max(0.0, self._core.clock() - since) if alive and since is not None else None
        return EngineHealth(alive, age, self._error)

    async def shutdown(self) -> None:
        """Stop after the step in flight; requests still running end with `UnavailableError`. Idempotent."""
        self._stopping = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._fail_all(UnavailableError("the engine was shut down"))

    # In the event loop's thread.

    def _tell(self, command: Callable[[], None]) -> None:
        """Run `command` in the engine's thread before its next step; a thread that never wakes counts as stalled."""
        self._busy_since = self._busy_since or self._core.clock()
        self._inbox.put(command)

    def _end(self, request_id: str, stream: _Stream) -> None:
        """Let go of a request. Names the stream as well: the id may already belong to another one."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._tell(lambda: self._remove(request_id))

    def _fail_all(self, error: RequestError) -> None:
        self._flush()
        for stream in self._streams.values():
            stream.outputs.put_nowait(error)

    def _flush(self) -> None:
        """Give every stream its outputs; those of the next `stream_interval_s` seconds wait for the next flush."""
        if self._next_flush is not None:
            self._next_flush.cancel()
            self._next_flush = None
        gathered: dict[_Stream, list[TokenDelta]] = {}
        while self._outputs:
            stream, deltas = self._outputs.popleft()
            gathered.setdefault(stream, []).extend(deltas)
        if gathered and self._stream_interval_s:
            self._next_flush = self._loop.call_later(self._stream_interval_s, self._flush)
        for stream, deltas in gathered.items():
            stream.outputs.put_nowait(join_deltas(deltas))

    def _started(self, error: BaseException | None) -> None:
        if self._ready.cancelled():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    # In the engine's thread.

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
        except BaseException as error:  # a panic of a Rust library is no Exception
            logger.exception("the engine died")
            self._error = f"the engine died: {type(error).__name__}: {error}"
            self._hand_over_outputs()
            self._hand_over(self._fail_all, EngineError(_DIED, code=ENGINE_DIED))

    def _turn(self) -> None:
        """Run the inbox's commands, then one step, or sleep until a command or time allows one."""
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
            self._sleep(core.clock() + BATCH_POLL_S)
        else:
            self._note_outputs(deltas)

    def _sleep(self, until: float | None) -> bool:
        """Wait for a command until `until` at most, and run it; whether there was one."""
        self._busy_since = None
        timeout = None if until is None else max(0.0, until - self._core.clock())
        try:
            command = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return False
        command()
        return True

    def _note_outputs(self, deltas: list[TokenDelta]) -> None:
        groups: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            groups.setdefault(delta.request_id, []).append(delta)
        self._step_outputs = [(self._seated[request_id], group) for request_id, group in groups.items()]

    def _hand_over_outputs(self) -> None:
        """Flush the last step's outputs, unless a flush is planned that is soon enough."""
        # None is lost: they are queued before the plan is read; a flush clears the plan before it takes them.
        outputs, self._step_outputs = self._step_outputs, []
        self._outputs.extend(outputs)
        if outputs and (self._next_flush is None or any(_cannot_wait(d) for _, deltas in outputs for d in deltas)):
            self._hand_over(self._flush)

    def _add(self, request: EngineRequest, stream: _Stream) -> None:
        stats, config = self._core.stats(), self._core.config
        error: RequestError
        try:
            if stats.waiting + stats.running >= config.max_num_seqs + config.max_num_waiting:
                raise OverloadedError(f"the engine already holds {stats.waiting} waiting requests")
            self._core.add(request)
        except RequestError as refusal:
            error = refusal
        except Exception:
            logger.exception("adding request %r failed", request.request_id)
            error = EngineError("the engine failed to take the request")
        else:
            self._seated[request.request_id] = stream
            return
        self._hand_over(stream.outputs.put_nowait, error)

    def _remove(self, request_id: str) -> None:
        self._seated.pop(request_id, None)
        self._core.abort(request_id)

    def _hand_over(self, callback: Callable[..., object], *args: object) -> None:
        """Run `callback` on the event loop; when that is gone, nobody is left to tell, and the engine ends."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping = True


def _cannot_wait(delta: TokenDelta) -> bool:
    """Whether it is the first or last delta of its choice here."""
    return delta.offset == 0 or delta.num_cached_tokens is not None or delta.finish_reason is not None
