"""One request, as many attempts as it takes: its reader sees one stream, whatever becomes of the replicas.

Decides whether a lost attempt is followed by another one, when, and whether that one has a replica to itself:

- A request's own errors are final. A replica that died, fell silent, is being stopped or is gone costs an attempt: the
  next one, on another replica, is told all tokens so far and goes on from there (`Journal`).
- A request that was on two replicas when they died may be why. From then on it runs alone: a replica is reserved for
  it, whose other streams move away, or finish first where there is no other replica. Several may run so at once, as
  long as one replica is left for the others. It is refused when the third
  replica died under it before it got any further, or the sixth in all. A replica that gives a sign of life did not die.
- While no replica is left, requests wait for `wait_s`, since Ray replaces what died.
- A replica's "overloaded" is never told to the client: a request that came so far was let in, and waits for room.

State is per process: with several ingress replicas each counts, and reserves, for its own requests only. What is wrong
with a replica is found by an attempt or by the `Watchdog`. Knows no Ray.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager

from serve_app.core.output import TokenDelta
from serve_app.core.request import EngineRequest
from serve_app.errors import EngineError, OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.serving.attempt import Attempt, AttemptObserver, LossReason, ReplicaLostError, Transport
from serve_app.serving.journal import Journal, OutOfPlaceError
from serve_app.serving.replica_set import Condition, Replica, ReplicaSet

OnFailover = Callable[[LossReason, int], None]

RETRY_AFTER_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_DEATHS_BEFORE_ALONE = 2
_MAX_DEATHS = 6


class Failover:
    """Runs requests over `transport`. For one event loop, the one it is made on."""

    def __init__(
        self,
        transport: Transport,
        replicas: ReplicaSet,
        *,
        wait_s: float,
        observer: AttemptObserver,
        on_failover: OnFailover,
    ) -> None:
        """`on_failover(reason, tokens)`: a replica lost an attempt; so many known tokens are to be computed again."""
        self.attempts: dict[str, Attempt] = {}
        self._transport = transport
        self._replicas = replicas
        self._wait_s = wait_s
        self._observer = observer
        self._on_failover = on_failover
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._none_since: float | None = self._loop.time()
        self._wake()
        replicas.add_listener(self._replicas_changed)

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
        """News of the request until all its choices have finished, or are in `ended`, which the reader may fill.

        `deadline` is in monotonic seconds; `visited` gains the replicas that had the request. Raises `RequestError`:
        the request's own; `RequestTimeoutError`; `UnavailableError` when no replica came back in time; `EngineError`
        for a request that replicas die of. Closing or cancelling the generator ends the attempt that is running.
        """
        journal = Journal(request, ended)
        course = _Course(self._wait_s, [] if visited is None else visited)
        while not journal.complete:
            try:
                async with self._attempt(journal, course, deadline, session) as attempt:
                    while not journal.complete:
                        if news := journal.accept(await attempt.next()):
                            course.got_news()
                            yield news
            except OutOfPlaceError:
                await course.lost(ReplicaLostError(LossReason.CUT))
            except ReplicaLostError as loss:
                await course.lost(loss)
            except OverloadedError:
                pass  # the next attempt is sent when there is room

    @asynccontextmanager
    async def _attempt(
        self, journal: Journal, course: "_Course", deadline: float, session: str | None
    ) -> AsyncIterator[Attempt]:
        """The next attempt, once a replica may take it. It is over when the context is left."""
        course.num_attempts += 1
        request_id = journal.request.request_id
        attempt_id = f"{request_id}.{course.num_attempts}"
        async with AsyncExitStack() as stack:
            stack.callback(self._observer.ended, attempt_id)
            stack.callback(self._replicas.end, attempt_id)
            try:
                async with asyncio.timeout_at(deadline):
                    if course.must_run_alone:
                        self._replicas.pin(attempt_id, await stack.enter_async_context(self._alone()))
                    else:
                        await self._until(self._replicas.any_routable)
            except TimeoutError:
                raise RequestTimeoutError("no engine replica was free before the request's deadline") from None
            self._replicas.begin(attempt_id)
            stream = self._transport.generate(journal.next_attempt(), attempt_id, session, course.since)
            stack.callback(stream.cancel)
            attempt = Attempt(request_id, attempt_id, stream, self._replicas, self._observer, deadline)
            self.attempts[attempt_id] = attempt
            stack.callback(self.attempts.pop, attempt_id)
            try:
                yield attempt
            except ReplicaLostError as loss:
                loss.replica = attempt.replica
                self._note(loss, journal.num_known_tokens)
                raise
            except OverloadedError:
                self._observer.refused(attempt_id, self._loop.time())
                raise
            finally:
                if attempt.replica is not None:
                    course.visited.append(attempt.replica.replica_id)

    def _note(self, loss: ReplicaLostError, num_known_tokens: int) -> None:
        if loss.replica is None:
            return
        if loss.reason.is_suspicious:
            self._replicas.suspect(loss.replica.replica_id, loss.reason)
        self._on_failover(loss.reason, num_known_tokens)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[str]:
        """A replica without any other stream of this process."""
        while True:
            await self._until(lambda: bool(self._reservable()))
            replica_id = min(self._reservable(), key=self._replicas.in_flight)
            self._replicas.reserve(replica_id)
            try:
                if await self._emptied(replica_id):
                    yield replica_id
                    return
            finally:
                self._replicas.release(replica_id)

    def _reservable(self) -> list[str]:
        """Unreserved replicas, if one of them may be reserved: the last is the others', unless it is the only one."""
        free = self._replicas.routable(self._replicas.current())
        return free if len(free) > 1 or free == self._replicas.alive() else []

    async def _emptied(self, replica_id: str) -> bool:
        """Wait until the replica has no streams; False if it is lost before."""
        while self._replicas.is_alive(replica_id):
            if not self._replicas.in_flight(replica_id):
                return True
            if self._replicas.any_routable():
                for attempt in self.attempts.values():
                    if attempt.replica is not None and attempt.replica.replica_id == replica_id:
                        attempt.interrupt(LossReason.ISOLATION)
            await self._changed.wait()
        return False

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the replicas meet `condition`; raises `UnavailableError` when there was none for `wait_s`."""
        while not condition():
            give_up = None if self._none_since is None else self._none_since + self._wait_s
            try:
                async with asyncio.timeout_at(give_up):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError("no engine replica is running", retry_after_s=RETRY_AFTER_S) from None

    def _replicas_changed(self) -> None:
        """In whichever thread the change was made."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._replicas.alive():
            self._none_since = None
        elif self._none_since is None:
            self._none_since = self._loop.time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Course:
    """How one request has fared, and what follows from it."""

    def __init__(self, wait_s: float, visited: list[str]) -> None:
        self.since = asyncio.get_running_loop().time()
        self.num_attempts = 0
        self.visited = visited
        self._wait_s = wait_s
        self._killed: set[Replica] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        """What counts only as long as there is no news in between."""
        self._num_fruitless_losses = self._num_fruitless_deaths = 0
        self._paused_s = 0.0

    @property
    def must_run_alone(self) -> bool:
        """Whether replicas died under the request so often that it may be why."""
        return self._num_deaths >= _DEATHS_BEFORE_ALONE

    @property
    def _num_deaths(self) -> int:
        return sum(replica.condition is not Condition.OK for replica in self._killed)

    def got_news(self) -> None:
        """The attempt has moved the request on."""
        if self._num_fruitless_losses:
            self._start_anew()

    async def lost(self, loss: ReplicaLostError) -> None:
        """Return when it is time for the next attempt; raises `EngineError` or `UnavailableError` if there is none."""
        if loss.reason.is_planned:
            return
        if loss.reason.is_death and loss.replica is not None:
            self._killed.add(loss.replica)
            stuck = self._num_deaths > _DEATHS_BEFORE_ALONE and self._num_fruitless_deaths > 0
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
        """The first attempt after news follows at once."""
        self._num_fruitless_losses += 1
        if self._num_fruitless_losses > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_fruitless_losses - 2), _MAX_PAUSE_S)
            self._paused_s += pause_s
            await asyncio.sleep(pause_s)
