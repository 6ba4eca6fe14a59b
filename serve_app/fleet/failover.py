"""One request, as many attempts as it takes: its reader sees one stream, whatever becomes of the replicas.

Decides whether a lost attempt is followed by another one, when, and whether that one has a replica to itself:

- A request's own errors are final. A replica that died, fell silent, is being stopped or is gone costs an attempt: the
  next one gets all tokens so far and goes on from there (`ResumeState`), on another replica, once that has a free slot.
- A request may be poison, which kills replicas, if it got nothing out of two before they died: then it runs alone
  (`Quarantine`) until its next tokens. It is refused when the third dies so, or the sixth in all; of the first, every
  request like it is refused for some minutes (`PoisonRequests`). A replica that gives a sign of life did not die.
- While no replica is left, requests wait for `wait_s`, since Ray replaces what died.
- A replica's "overloaded" never reaches the client: a request that came this far was admitted, and waits for room.

State is per process: with several ingress replicas each counts, and reserves, for its own requests only. What is wrong
with a replica is found by an attempt or by the `Watchdog`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from serve_app.core.admission_queue import Place
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.errors import KILLED_REPLICAS, EngineError, OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.fleet.attempt import Attempt, Condition, Replica, Transport
from serve_app.fleet.availability import RETRY_AFTER_S, Availability
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.poison_requests import PoisonRequests
from serve_app.fleet.quarantine import Isolation, Quarantine
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.resume_state import OutOfPlaceError, ResumeState
from serve_app.fleet.unread import UnreadBytes

OnFailover = Callable[[LossReason, int], None]

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_DEATHS_BEFORE_QUARANTINE = 2
_MAX_DEATHS = 6


class Failover:
    """Runs requests over `transport`. For one event loop, the one it is made on."""

    def __init__(self, transport: Transport, replicas: ReplicaSet, *, wait_s: float, on_failover: OnFailover) -> None:
        """`on_failover(reason, tokens)`: an attempt was lost; `tokens` known tokens are to be computed again."""
        self._transport = transport
        self._replicas = replicas
        self._on_failover = on_failover
        self._loop = asyncio.get_running_loop()
        self._availability = Availability(replicas, wait_s)
        self._quarantine = Quarantine(replicas, self._availability)
        self._poison_requests = PoisonRequests()
        self.unread = UnreadBytes()

    @property
    def without_replicas_s(self) -> float:
        """For how many seconds no replica has been there; 0 while one is."""
        return self._availability.without_replicas_s

    async def generate(
        self,
        request: EngineRequest,
        *,
        deadline: float,
        session: str | None = None,
        ended: Set[int] = frozenset(),
        visited: list[str] | None = None,
        place: Place | None = None,
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Outputs of the request until all its choices have finished, or are in `ended`, which the reader may fill.

        `deadline` is in monotonic seconds; `visited` gains the replicas that had the request; `place` is lent while the
        reader is so far behind that no replica has it. Raises `RequestError`: the request's own; `RequestTimeoutError`;
        `UnavailableError` when no replica came back in time; `EngineError` for a request that replicas die of. Closing
        or cancelling the generator ends the attempt that is running.
        """
        if self._poison_requests.knows(request, self._loop.time()):
            raise EngineError("engine replicas were lost while they had a request like this", code=KILLED_REPLICAS)
        resume = ResumeState(request, ended)
        retry = RetryState(self._availability.wait_s, [] if visited is None else visited)
        while not resume.complete:
            try:
                async with self._attempt(resume, retry, deadline, session, place) as (attempt, isolation):
                    while not resume.complete:
                        if outputs := resume.accept(await attempt.next()):
                            retry.got_outputs(attempt)
                            if isolation is not None:
                                attempt.reserved = None
                                isolation.end()
                            yield outputs
            except OutOfPlaceError:
                await retry.lost(LossReason.CUT, None)
            except ReplicaLostError as loss:
                if place is not None and loss.reason is LossReason.UNREAD:
                    place.take_back()
                with self._remembering(request, retry):
                    await retry.lost(loss.reason, retry.last_replica)
            except OverloadedError:
                pass  # the next attempt is sent when there is room

    @contextmanager
    def _remembering(self, request: EngineRequest, retry: "RetryState") -> Iterator[None]:
        """Remember a request that is refused because replicas died of it; others were only there when some did."""
        try:
            yield
        except EngineError:
            if retry.is_suspect:
                self._poison_requests.add(request, self._loop.time())
            raise

    @asynccontextmanager
    async def _attempt(
        self, resume: ResumeState, retry: "RetryState", deadline: float, session: str | None, place: Place | None
    ) -> AsyncIterator[tuple[Attempt, Isolation | None]]:
        """The next attempt, once a replica may take it. It is over when the context is left."""
        async with AsyncExitStack() as stack:
            isolation = None
            revision = retry.revision
            try:
                async with asyncio.timeout_at(deadline):
                    if retry.is_suspect:
                        isolation = await stack.enter_async_context(self._quarantine.isolation(revision))
                    else:
                        await self._availability.until(lambda: bool(self._replicas.routable(revision)), revision)
            except TimeoutError:
                raise RequestTimeoutError("no engine replica was free before the request's deadline") from None
            attempt = Attempt(
                retry.next_id(resume.request.request_id),
                resume.next_attempt(),
                since=retry.since,
                deadline=deadline,
                session=session,
                revision=revision,
                reserved=None if isolation is None else isolation.replica,
                needs_slot=retry.was_lost,
                unread=self.unread,
                on_unread=None if place is None else place.lend,
            )
            stack.callback(attempt.close)
            stack.callback(self._transport.stop, attempt)
            self._transport.start(attempt)
            try:
                yield attempt, isolation
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


class RetryState:
    """How one request has fared, and what follows from it."""

    def __init__(self, wait_s: float, visited: list[str]) -> None:
        self.since = asyncio.get_running_loop().time()
        self.revision: str | None = None
        """Of the replicas that can go on, once some output is known."""
        self.last_replica: Replica | None = None
        self.was_lost = False
        """Whether a replica has lost it."""
        self._num_attempts = 0
        self._has_outputs = False
        """Whether the present attempt has brought any."""
        self._visited = visited
        self._wait_s = wait_s
        self._killed: set[Replica] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        """Reset what counts only until the next outputs."""
        self._num_fruitless_losses = self._num_fruitless_deaths = 0
        self._killed_at_once: set[Replica] = set()
        self._paused_s = 0.0

    def next_id(self, request_id: str) -> str:
        """The id of the next attempt."""
        self._num_attempts += 1
        self._has_outputs = False
        return f"{request_id}.{self._num_attempts}"

    def visit(self, replica: Replica | None) -> None:
        """An attempt is over that was at this replica, if it was placed."""
        self.last_replica = replica
        if replica is not None:
            self._visited.append(replica.replica_id)

    @property
    def is_suspect(self) -> bool:
        """Whether so many replicas died before the request got anything out of them that it may be why."""
        return _num_dead(self._killed_at_once) >= _DEATHS_BEFORE_QUARANTINE

    def got_outputs(self, attempt: Attempt) -> None:
        """The attempt brought outputs: from now on only its revision can continue the request."""
        if attempt.replica is not None:
            self.revision = attempt.replica.revision
        self._has_outputs = True
        if self._num_fruitless_losses:
            self._start_anew()

    async def lost(self, reason: LossReason, replica: Replica | None) -> None:
        """Return when it is time for the next attempt; raises `EngineError` or `UnavailableError` if there is none."""
        self.was_lost = True
        if reason.is_planned:
            return
        if reason.is_death and replica is not None:
            self._killed.add(replica)
            if not self._has_outputs:
                self._num_fruitless_deaths += 1
                self._killed_at_once.add(replica)
            stuck = _num_dead(self._killed_at_once) > _DEATHS_BEFORE_QUARANTINE
            if stuck or max(_num_dead(self._killed), self._num_fruitless_deaths) >= _MAX_DEATHS:
                raise EngineError(
                    f"{len(self._killed)} engine replicas were lost while they had this request", code=KILLED_REPLICAS
                )
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


def _num_dead(replicas: Iterable[Replica]) -> int:
    return sum(replica.condition is not Condition.OK for replica in replicas)
