"""One request, as many attempts as it takes: its reader sees one stream, whatever becomes of the replicas.

Decides whether a lost attempt is followed by another one, when, and whether that one has a replica to itself:

- A request's own errors are final. A replica that died, fell silent, is being stopped or is gone costs an attempt: the
  next one, on another replica, gets all tokens so far and goes on from there (`ResumeState`).
- A request that was on two replicas when they died may be a poison request, one that kills them. From then on it is in
  quarantine: a replica is reserved for it, whose other streams move away, or finish first where there is no other
  replica. Several may be in quarantine at once, as long as one replica is left for the others. A request is refused
  when the third replica died under it without any progress, or the sixth in all. A replica that gives a sign of
  life did not die.
- While no replica is left, requests wait for `wait_s`, since Ray replaces what died.
- A replica's "overloaded" never reaches the client: a request that came this far was admitted, and waits for room.

State is per process: with several ingress replicas each counts, and reserves, for its own requests only. What is wrong
with a replica is found by an attempt or by the `Watchdog`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager

from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.errors import EngineError, OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.fleet.attempt import Attempt, Condition, Replica, Transport
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.resume_state import OutOfPlaceError, ResumeState

OnFailover = Callable[[LossReason, int], None]

RETRY_AFTER_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_DEATHS_BEFORE_QUARANTINE = 2
_MAX_DEATHS = 6


class Failover:
    """Runs requests over `transport`. For one event loop, the one it is made on."""

    def __init__(self, transport: Transport, replicas: ReplicaSet, *, wait_s: float, on_failover: OnFailover) -> None:
        """`on_failover(reason, tokens)`: an attempt was lost; `tokens` known tokens are to be computed again."""
        self._transport = transport
        self._replicas = replicas
        self._wait_s = wait_s
        self._on_failover = on_failover
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._none_since: float | None = self._loop.time()
        self._wake()
        replicas.add_listener(lambda: self._loop.call_soon(self._wake))

    @property
    def without_replicas_s(self) -> float:
        """For how many seconds no replica has been there; 0 while one is."""
        return 0.0 if self._none_since is None else self._loop.time() - self._none_since

    async def generate(
        self,
        request: EngineRequest,
        *,
        deadline: float,
        session: str | None = None,
        ended: Set[int] = frozenset(),
        visited: list[str] | None = None,
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Outputs of the request until all its choices have finished, or are in `ended`, which the reader may fill.

        `deadline` is in monotonic seconds; `visited` gains the replicas that had the request. Raises `RequestError`:
        the request's own; `RequestTimeoutError`; `UnavailableError` when no replica came back in time; `EngineError`
        for a request that replicas die of. Closing or cancelling the generator ends the attempt that is running.
        """
        resume = ResumeState(request, ended)
        retry = RetryState(self._wait_s, [] if visited is None else visited)
        while not resume.complete:
            try:
                async with self._attempt(resume, retry, deadline, session) as attempt:
                    while not resume.complete:
                        if outputs := resume.accept(await attempt.next()):
                            retry.got_outputs(attempt)
                            yield outputs
            except OutOfPlaceError:
                await retry.lost(LossReason.CUT, None)
            except ReplicaLostError as loss:
                await retry.lost(loss.reason, retry.last_replica)
            except OverloadedError:
                pass  # the next attempt is sent when there is room

    @asynccontextmanager
    async def _attempt(
        self, resume: ResumeState, retry: "RetryState", deadline: float, session: str | None
    ) -> AsyncIterator[Attempt]:
        """The next attempt, once a replica may take it. It is over when the context is left."""
        async with AsyncExitStack() as stack:
            reserved = None
            try:
                async with asyncio.timeout_at(deadline):
                    if retry.needs_quarantine:
                        reserved = await stack.enter_async_context(self._quarantine(retry.revision))
                    else:
                        await self._until(lambda: bool(self._replicas.routable(retry.revision)), retry.revision)
            except TimeoutError:
                raise RequestTimeoutError("no engine replica was free before the request's deadline") from None
            attempt = Attempt(
                retry.next_id(resume.request.request_id),
                resume.next_attempt(),
                since=retry.since,
                deadline=deadline,
                session=session,
                revision=retry.revision,
                reserved=reserved,
            )
            stack.callback(self._transport.stop, attempt)
            self._transport.start(attempt)
            try:
                yield attempt
            except ReplicaLostError as loss:
                self._note(loss.reason, attempt.replica, resume.num_known_tokens)
                raise
            except OverloadedError:
                if attempt.placement is not None:
                    attempt.placement.refused(self._loop.time())
                raise
            finally:
                retry.visit(attempt.replica)

    def _note(self, reason: LossReason, replica: Replica | None, num_known_tokens: int) -> None:
        if replica is None:
            return
        if reason.is_suspicious:
            self._replicas.suspect(replica.replica_id, reason)
        self._on_failover(reason, num_known_tokens)

    @asynccontextmanager
    async def _quarantine(self, revision: str | None) -> AsyncIterator[Replica]:
        """A replica without any other stream of this process."""
        while True:
            await self._until(lambda: bool(self._reservable(revision)), revision)
            replica = min(self._reservable(revision), key=lambda replica: len(replica.attempts))
            self._replicas.reserve(replica.replica_id)
            try:
                if await self._emptied(replica):
                    yield replica
                    return
            finally:
                self._replicas.release(replica.replica_id)

    def _reservable(self, revision: str | None) -> list[Replica]:
        """Unreserved replicas, if one of them may be reserved: the last is the others', unless it is the only one."""
        free = self._replicas.routable(revision)
        return free if len(free) > 1 or free == self._replicas.alive(revision) else []

    async def _emptied(self, replica: Replica) -> bool:
        """Wait until the replica has no streams; False if it is lost before."""
        while self._replicas.is_alive(replica):
            if not replica.attempts:
                return True
            if self._replicas.routable(replica.revision):
                for attempt in replica.attempts.values():
                    attempt.interrupt(LossReason.QUARANTINE)
            await self._changed.wait()
        return False

    async def _until(self, condition: Callable[[], bool], revision: str | None) -> None:
        """Wait until the replicas meet `condition`; raises `UnavailableError` when there was none for `wait_s`."""
        asked_at = self._loop.time()
        while not condition():
            none_since = self._none_since
            if none_since is None and not self._replicas.alive(revision):
                none_since = asked_at
            try:
                async with asyncio.timeout_at(None if none_since is None else none_since + self._wait_s):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError("no engine replica is running", retry_after_s=RETRY_AFTER_S) from None

    def _wake(self) -> None:
        if self._replicas.alive():
            self._none_since = None
        elif self._none_since is None:
            self._none_since = self._loop.time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class RetryState:
    """How one request has fared, and what follows from it."""

    def __init__(self, wait_s: float, visited: list[str]) -> None:
        self.since = asyncio.get_running_loop().time()
        self.revision: str | None = None
        """Of the replicas that can go on, once some output is known."""
        self.last_replica: Replica | None = None
        self._num_attempts = 0
        self._visited = visited
        self._wait_s = wait_s
        self._killed: set[Replica] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        """Reset what counts only until the next outputs."""
        self._num_fruitless_losses = self._num_fruitless_deaths = 0
        self._paused_s = 0.0

    def next_id(self, request_id: str) -> str:
        """The id of the next attempt."""
        self._num_attempts += 1
        return f"{request_id}.{self._num_attempts}"

    def visit(self, replica: Replica | None) -> None:
        """An attempt is over that was at this replica, if it was placed."""
        self.last_replica = replica
        if replica is not None:
            self._visited.append(replica.replica_id)

    @property
    def needs_quarantine(self) -> bool:
        """Whether replicas died under the request so often that it may be why."""
        return self._num_deaths >= _DEATHS_BEFORE_QUARANTINE

    @property
    def _num_deaths(self) -> int:
        return sum(replica.condition is not Condition.OK for replica in self._killed)

    def got_outputs(self, attempt: Attempt) -> None:
        """The attempt brought outputs: from now on only its revision can continue the request."""
        if attempt.replica is not None:
            self.revision = attempt.replica.revision
        if self._num_fruitless_losses:
            self._start_anew()

    async def lost(self, reason: LossReason, replica: Replica | None) -> None:
        """Return when it is time for the next attempt; raises `EngineError` or `UnavailableError` if there is none."""
        if reason.is_planned:
            return
        if reason.is_death and replica is not None:
            self._killed.add(replica)
            stuck = self._num_deaths > _DEATHS_BEFORE_QUARANTINE and self._num_fruitless_deaths > 0
            if stuck or max(self._num_deaths, self._num_fruitless_deaths) >= _MAX_DEATHS:
                raise EngineError(
                    f"{len(self._killed)} engine replicas were lost while they had this request",
                    code="request_killed_replicas",
                )
            self._num_fruitless_deaths += 1
        elif self._paused_s > self._wait_s:
            raise UnavailableError("no engine replica keeps the request", retry_after_s=RETRY_AFTER_S)
        await self._pause()

    async def _pause(self) -> None:
        """Wait before the next attempt; the first one after outputs follows at once."""
        self._num_fruitless_losses += 1
        if self._num_fruitless_losses > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_fruitless_losses - 2), _MAX_PAUSE_S)
            self._paused_s += pause_s
            await asyncio.sleep(pause_s)
