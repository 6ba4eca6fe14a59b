"""Runs a request over as many attempts as needed, so that its reader sees one stream.

Decides whether and when another attempt follows a lost one, and whether it gets a replica of its
own:

- A request's own errors are final. A replica that died, fell silent, is being stopped or is gone
  ends only the attempt. The next one gets all tokens so far and continues there (`ResumeState`), on
  another replica with a free slot.
- A request that got no output from two replicas before they died may be poison. It then runs alone
  (`Quarantine`) until its next tokens. It is refused when a third replica dies so, or six in all.
  After the former, equal requests are refused for some minutes (`PoisonRequests`). A replica that
  shows activity again did not die.
- While there is no replica, requests wait for `wait_s`, because Ray replaces what died.
- A replica's "overloaded" never reaches the client: the request was already admitted, so it waits
  for room.

State is per process: each ingress replica counts, and reserves replicas, for its own requests only.
Attempts and the `Watchdog` detect failed replicas.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from serve_app.core.admission_queue import AdmissionSlots
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.errors import KILLED_REPLICAS, EngineError, OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.fleet.attempt import Attempt, Condition, Replica, Transport
from serve_app.fleet.availability import RETRY_AFTER_S, Availability
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.poison_requests import PoisonRequests
from serve_app.fleet.quarantine import Isolation, Quarantine
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.resume_state import ResumeState, TokenGapError
from serve_app.fleet.unread import UnreadBytes

OnFailover = Callable[[LossReason, int], None]

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_DEATHS_BEFORE_QUARANTINE = 2
_MAX_DEATHS = 6


class Failover:
    """Runs requests over `transport`. Not thread-safe: use it on the event loop that created it."""

    def __init__(self, transport: Transport, replicas: ReplicaSet, *, wait_s: float, on_failover: OnFailover) -> None:
        """`on_failover(reason, tokens)`: called after a lost attempt. `tokens` are recomputed."""
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
        """Seconds since there was a replica; 0 if there is one."""
        return self._availability.without_replicas_s

    async def generate(
        self,
        request: EngineRequest,
        *,
        deadline: float,
        session: str | None = None,
        ended: Set[int] = frozenset(),
        visited: list[str] | None = None,
        slots: AdmissionSlots | None = None,
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the request's outputs until every choice has finished or is in `ended`.

        - `ended`: choices that the reader no longer needs; the reader may add to it.
        - `deadline`: in monotonic seconds.
        - `visited`: the replicas that ran the request are appended.
        - `slots`: the admission slots; released while the reader is so far behind that no replica
          runs the request.

        Raises the request's own `RequestError`; `RequestTimeoutError`; `UnavailableError` if no
        replica returned in time; `EngineError` if the request kills replicas. Closing or cancelling
        the generator ends the running attempt.
        """
        if self._poison_requests.knows(request, self._loop.time()):
            raise EngineError("engine replicas died while they ran a request like this one", code=KILLED_REPLICAS)
        resume = ResumeState(request, ended)
        retry = RetryState(self._availability.wait_s, [] if visited is None else visited)
        while not resume.complete:
            try:
                async with self._attempt(resume, retry, deadline, session, slots) as (attempt, isolation):
                    while not resume.complete:
                        if outputs := resume.accept(await attempt.next()):
                            retry.got_outputs(attempt)
                            if isolation is not None:
                                attempt.reserved = None
                                isolation.end()
                            yield outputs
            except TokenGapError:
                await retry.lost(LossReason.CUT, None)
            except ReplicaLostError as loss:
                if slots is not None and loss.reason is LossReason.UNREAD:
                    slots.reclaim()
                with self._remembering(request, retry):
                    await retry.lost(loss.reason, retry.last_replica)
            except OverloadedError:
                pass  # the next attempt is sent when a replica has room

    @contextmanager
    def _remembering(self, request: EngineRequest, retry: "RetryState") -> Iterator[None]:
        """Remember a refused request if replicas died before it got output from them.

        Other refused requests may only have run on replicas that died for another reason.
        """
        try:
            yield
        except EngineError:
            if retry.is_suspect:
                self._poison_requests.add(request, self._loop.time())
            raise

    @asynccontextmanager
    async def _attempt(
        self,
        resume: ResumeState,
        retry: "RetryState",
        deadline: float,
        session: str | None,
        slots: AdmissionSlots | None,
    ) -> AsyncIterator[tuple[Attempt, Isolation | None]]:
        """Start the next attempt once a replica may take it. Leaving the context ends it."""
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
                on_unread=None if slots is None else slots.release,
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
    """The history of one request's attempts, and what follows from it."""

    def __init__(self, wait_s: float, visited: list[str]) -> None:
        self.since = asyncio.get_running_loop().time()
        self.revision: str | None = None
        """Revision of the replicas that can continue, once there is output."""
        self.last_replica: Replica | None = None
        self.was_lost = False
        """Whether a replica lost the request."""
        self._num_attempts = 0
        self._has_outputs = False
        """Whether the current attempt has produced outputs."""
        self._visited = visited
        self._wait_s = wait_s
        self._killed: set[Replica] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        """Reset the counters that count since the last outputs."""
        self._num_fruitless_losses = self._num_fruitless_deaths = 0
        self._killed_at_once: set[Replica] = set()
        self._paused_s = 0.0

    def next_id(self, request_id: str) -> str:
        """Return the id of the next attempt."""
        self._num_attempts += 1
        self._has_outputs = False
        return f"{request_id}.{self._num_attempts}"

    def visit(self, replica: Replica | None) -> None:
        """Record that an attempt has ended, on `replica` if it was placed."""
        self.last_replica = replica
        if replica is not None:
            self._visited.append(replica.replica_id)

    @property
    def is_suspect(self) -> bool:
        """Whether the request may kill replicas: two died before it got output from them."""
        return _num_dead(self._killed_at_once) >= _DEATHS_BEFORE_QUARANTINE

    def got_outputs(self, attempt: Attempt) -> None:
        """Record outputs. From now on, only replicas of this revision can continue."""
        if attempt.replica is not None:
            self.revision = attempt.replica.revision
        self._has_outputs = True
        if self._num_fruitless_losses:
            self._start_anew()

    async def lost(self, reason: LossReason, replica: Replica | None) -> None:
        """Record a lost attempt and wait until the next one may start.

        Raises `EngineError` or `UnavailableError` if there will be none.
        """
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
                    f"{len(self._killed)} engine replicas died while they ran this request", code=KILLED_REPLICAS
                )
        elif self._paused_s > self._wait_s:
            raise UnavailableError("no engine replica accepts the request", retry_after_s=RETRY_AFTER_S)
        await self._pause()

    async def _pause(self) -> None:
        """Wait before the next attempt. There is no pause for the first loss after outputs."""
        self._num_fruitless_losses += 1
        if self._num_fruitless_losses > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_fruitless_losses - 2), _MAX_PAUSE_S)
            self._paused_s += pause_s
            await asyncio.sleep(pause_s)


def _num_dead(replicas: Iterable[Replica]) -> int:
    return sum(replica.condition is not Condition.OK for replica in replicas)
