"""One experiment: running streams, one fault, and the checks afterwards.

Defines the checks after every fault and the columns of the report. `faults` defines the faults.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import aiohttp

from load_tests.chaos.fleet import Fleet, Holding, NotInTimeError, Shape
from load_tests.chaos.traffic import (
    STOPPED,
    Answer,
    Ask,
    Outcome,
    ask,
    compare,
    first_difference,
    mixed,
    open_session,
    send,
    send_into,
    send_until_taken,
    settle,
    with_stop,
)
from load_tests.chaos.traffic import text as prompt_text

STREAMS = 32
_MAX_TOKENS = 400
_VICTIM_TOKENS = 1500
_LOCATE_LIMIT_S = 20.0
_PROBE_PAUSE_S = 0.1
_PROBE_LIMIT_S = 120.0
_STREAMS_LIMIT_S = 180.0
_SETTLE_LIMIT_S = 60.0
# Where an update was quick, what was sent before it may still fill the line.
_LEARNING_LIMIT_S = 60.0
_FD_SLACK, _THREAD_SLACK, _TASK_SLACK = 12, 8, 8
_MEMORY_SLACK, _MEMORY_SLACK_MIB = 0.10, 4
# The proxy keeps idle connections, a pair per former stream, and their buffers of 32 KiB.
_PROXY_FD_SLACK, _PROXY_MEMORY_SLACK_MIB = 72, 40
PROBE = ask("probe", "Is anybody there?", 8)


@dataclass(frozen=True)
class Fault:
    """A fault, and the outcomes that it allows for running and new requests besides complete
    answers."""

    name: str
    strike: Callable[["Experiment"], Any]
    allowed: frozenset[Outcome] = frozenset()
    moments: tuple[str, ...] = ("known", "random")
    """`known`: at a given event of a given stream. `random`: at any time, under 32 streams."""
    last: bool = False
    """Whether the fault ends the fleet."""
    on_nodes: bool = False
    """Whether the fault needs a fleet on several Ray nodes."""
    shape: Shape = Shape()
    recovery_limit_s: float = 30.0
    """Limit in seconds from the strike until a new request is served."""
    stall_limit_s: float = 30.0
    """Limit in seconds of the silence of a surviving stream."""


@dataclass
class Row:
    """The outcome of one experiment. Times are in seconds; None if not measured."""

    fault: str
    path: str
    moment: str
    requests: int = 0
    complete: int = 0
    errors: int = 0
    cut: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    stall_s: float | None = None
    """The longest silence of a completed stream, including the wait for its first event."""
    recovery_s: float | None = None
    """From the strike until a new request was served."""
    whole_s: float | None = None
    """From the strike until every replica was ready again."""
    problems: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


class UndisturbedError(Exception):
    """A request failed although no fault had been injected."""


class References:
    """The answers of undisturbed servers. Each request is sent once."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    async def learn(self, session: aiohttp.ClientSession, url: str, asks: Sequence[Ask]) -> None:
        """Send all requests that have no reference yet at once, again while the queue is full.

        Raises `UndisturbedError` if one fails.
        """
        unknown = {a.key: a for a in asks if a.key not in self._answers}
        gate = asyncio.Semaphore(STREAMS)

        async def one(a: Ask) -> Answer:
            async with gate:
                return await send_until_taken(session, url, a, _LEARNING_LIMIT_S)

        for key, answer in zip(unknown, await asyncio.gather(*map(one, unknown.values())), strict=True):
            if answer.outcome is not Outcome.COMPLETE:
                raise UndisturbedError(
                    f"undisturbed, {answer.ask.name} ended as {answer.outcome.value}: {answer.detail}"
                )
            self._answers[key] = answer

    async def learn_mixed(self, session: aiohttp.ClientSession, url: str, asks: Sequence[Ask]) -> list[Ask]:
        """Learn requests of `traffic.mixed`.

        Return them with stop strings from their own answers.
        """
        await self.learn(session, url, asks)
        stopping = [with_stop(self._answers[a.key]) if a.name.startswith(STOPPED) else a for a in asks]
        await self.learn(session, url, stopping)
        return stopping

    def of(self, a: Ask) -> Answer | None:
        """Return the undisturbed answer; None if it is not known."""
        return self._answers.get(a.key)


class Experiment:
    """Injects one fault into a fleet and fills in a row.

    Call `run` once; faults use the other methods.
    """

    def __init__(self, fleet: Fleet, fault: Fault, moment: str, references: References, seed: int) -> None:
        self.fleet = fleet
        self.fault = fault
        self.moment = moment
        self.rng = Random(f"{seed} {fault.name} {moment}")
        self.row = Row(fault.name, fleet.path, moment)
        self.answers: list[Answer] = []
        self.wait_limit_s = fault.stall_limit_s
        """Limit of the wait for first events. Longer if the fault makes requests queue."""
        self.session: aiohttp.ClientSession = open_session()
        self._references = references
        self._later = References()
        """Answers of the fleet after an update to another model."""
        self.tasks: list[asyncio.Task[None]] = []
        self._first_event = asyncio.Event()
        self._struck_at: float | None = None
        self._prober: asyncio.Task[None] | None = None
        self._before: dict[int, Holding] = {}

    async def run(self) -> Row:
        """Run the whole experiment.

        Defects of the fleet are not raised but listed in `problems`.
        """
        async with self.session:
            try:
                await self.fleet.wait_whole()
                await self.fleet.wait_idle()
                await self.take_baseline()
                await self.fault.strike(self)
                await self.finish()
                if self._prober is not None:
                    await self._prober
                self._judge()
                if not self.fault.last:
                    await self._aftermath()
            except (NotInTimeError, UndisturbedError, TimeoutError) as error:
                self.row.problems.append(str(error) or type(error).__name__)
            finally:
                await settle(self.tasks, 0)
                if self._prober is not None:
                    self._prober.cancel()
        return self.row

    # What faults are made of.

    async def take_baseline(self) -> None:
        """Record the resources of each process, which must not grow."""
        self._before = await asyncio.to_thread(self.fleet.holdings)

    async def learn(self, asks: Sequence[Ask]) -> float:
        """Get the undisturbed answers to these requests before the strike.

        Return the seconds it took.
        """
        start = time.monotonic()
        await self._references.learn(self.session, self.fleet.url, asks)
        return time.monotonic() - start

    async def mixed(self, rng: Random, count: int, max_tokens: int) -> list[Ask]:
        """Return requests with every feature that failover must preserve, with known answers."""
        asks = mixed(rng, count, max_tokens)
        return await self._references.learn_mixed(self.session, self.fleet.url, asks)

    async def learn_again(self, asks: Sequence[Ask]) -> None:
        """Learn the updated fleet's answers to these requests.

        Later answers may match these or the old ones.
        """
        await self._later.learn(self.session, self.fleet.url, asks)

    def start(
        self, a: Ask, on_event: Callable[[Answer], None] = lambda _: None, may_read: asyncio.Event | None = None
    ) -> Answer:
        """Send a request.

        Its answer is filled in as events arrive; they are read once `may_read` is set.
        """

        def note(answer: Answer) -> None:
            self._first_event.set()
            on_event(answer)

        answer = Answer(a)
        self.answers.append(answer)
        self.tasks.append(asyncio.create_task(send_into(answer, self.session, self.fleet.url, note, may_read=may_read)))
        return answer

    async def streams(self, long_prompts: bool = False) -> None:
        """Start 32 streams."""
        rng = Random(5)
        if long_prompts:
            asks = [ask(f"long prompt {i}", prompt_text(rng, 1500), 64, temperature=1, seed=i) for i in range(STREAMS)]
            await self.learn(asks)
        else:
            asks = await self.mixed(rng, STREAMS, _MAX_TOKENS)
        for a in asks:
            self.start(a)

    async def victim(
        self, tokens: int = _VICTIM_TOKENS, prompt: int = 50, *, alone: bool = False
    ) -> tuple["Watched", int]:
        """Start one stream and, unless `alone`, others around it. Return it and its replica's pid.

        It has its own cache salt, so that its whole prompt is computed.
        """
        rng = Random(6)
        target = ask("victim", prompt_text(rng, prompt), tokens, temperature=1, seed=7, logprobs=1)
        await self.learn([target])
        others = [] if alone else await self.mixed(rng, 8, _MAX_TOKENS)
        watched = Watched()
        watched.answer = self.start(replace(target, body={**target.body, "cache_salt": "victim"}), watched.on_event)
        pid = await self.locate()
        for a in others:
            self.start(a)
        return watched, pid

    async def trickle(self, asks: Sequence[Ask]) -> None:
        """Keep eight requests running: start one more if there are fewer."""
        if sum(not task.done() for task in self.tasks) < 8:
            self.start(asks[len(self.tasks) % len(asks)])
        await asyncio.sleep(0.1)

    async def locate(self, but: int = 0) -> int:
        """Return the pid of the replica with the most requests, except `but`, as counted by the
        ingress."""
        deadline = time.monotonic() + _LOCATE_LIMIT_S
        while time.monotonic() < deadline:
            in_flight = await asyncio.to_thread(self.fleet.in_flight)
            in_flight.pop(but, None)
            if any(in_flight.values()):
                return max(in_flight, key=lambda pid: in_flight[pid])
        raise NotInTimeError("no replica has the victim")

    async def random_moment(self, within_s: float) -> None:
        """Wait until a stream has its first token, then for a random part of `within_s`."""
        await self._first_event.wait()
        await asyncio.sleep(self.rng.uniform(0, within_s))

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process, then probe until a new request is served."""
        os.kill(pid, number)
        self.struck()

    def struck(self) -> None:
        """Record the time of the fault and start to probe."""
        self._struck_at = time.monotonic()
        if self._prober is None and not self.fault.last:
            self._prober = asyncio.create_task(self._probe())

    async def finish(self) -> None:
        """Wait until every request has ended. Those that take too long count as hung."""
        await settle(self.tasks, _STREAMS_LIMIT_S)

    # What is checked.

    async def _probe(self) -> None:
        """Send requests until one is answered.

        Each has a time limit, since its connection may lead to a dead process.
        """
        assert self._struck_at is not None
        counts: dict[str, int] = {}
        while (elapsed := time.monotonic() - self._struck_at) < _PROBE_LIMIT_S:
            answer = Answer(PROBE)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.fault.recovery_limit_s):
                    await send_into(answer, self.session, self.fleet.url)
            if answer.outcome is Outcome.COMPLETE:
                self.row.recovery_s = time.monotonic() - self._struck_at
                break
            failure = f"{answer.outcome.value} {answer.detail}"[:120]
            counts[failure] = counts.get(failure, 0) + 1
            if answer.outcome not in self.fault.allowed and counts[failure] == 1:
                self.row.problems.append(f"a new request: {failure}")
            await asyncio.sleep(_PROBE_PAUSE_S)
        else:
            self.row.problems.append(f"no new request served within {elapsed:.0f} s")
        if counts:
            self.row.notes["probes"] = counts
        if self.row.recovery_s is not None and self.row.recovery_s > self.fault.recovery_limit_s:
            self.row.problems.append(f"a new request was served only after {self.row.recovery_s:.1f} s")

    def _judge(self) -> None:
        row = self.row
        row.requests = len(self.answers)
        outcomes = [answer.outcome for answer in self.answers]
        row.complete, row.errors, row.cut = map(outcomes.count, (Outcome.COMPLETE, Outcome.ERROR, Outcome.CUT))
        for answer in self.answers:
            if answer.outcome is not Outcome.COMPLETE and answer.outcome not in self.fault.allowed:
                row.problems.append(f"{answer.ask.name}: {answer.outcome.value} {answer.detail}")
            known = [said for of in (self._references.of, self._later.of) if (said := of(answer.ask)) is not None]
            if not known:
                continue
            undisturbed = next((said for said in known if compare(answer, said).equal), known[0])
            difference = compare(answer, undisturbed)
            row.lost_tokens += difference.lost
            row.doubled_tokens += difference.doubled
            if not difference.equal:
                row.problems.append(f"{answer.ask.name}: {first_difference(answer, undisturbed)}")
        survivors = [a for a in self.answers if a.outcome is Outcome.COMPLETE]
        struck_at = self._struck_at or 0.0
        row.stall_s = max((answer.silence_s(struck_at) for answer in survivors), default=None)
        gap_s = max((answer.longest_gap_s for answer in survivors), default=0.0)
        wait_s = max((answer.wait_s(struck_at) for answer in survivors), default=0.0)
        for silence_s, limit_s in ((gap_s, self.fault.stall_limit_s), (wait_s, self.wait_limit_s)):
            if silence_s > limit_s:
                row.problems.append(f"a stream was silent for {silence_s:.1f} s, longer than {limit_s:.1f} s")

    async def _aftermath(self) -> None:
        """Check that no resources leak, every replica is back, and the next request is answered
        correctly."""
        await self.fleet.wait_whole()
        if self._struck_at is not None:
            self.row.whole_s = time.monotonic() - self._struck_at
        try:
            await self.fleet.wait_idle()
        except NotInTimeError:
            self.row.problems.append(f"left behind: {self.fleet.busy()}")
        await self._check_holdings()
        answer = await asyncio.wait_for(send(self.session, self.fleet.url, PROBE), 60)
        undisturbed = self._references.of(PROBE)
        if answer.outcome is not Outcome.COMPLETE:
            self.row.problems.append(f"the next request ended as {answer.outcome.value}: {answer.detail}")
        elif undisturbed is not None and answer.said() != undisturbed.said():
            self.row.problems.append("the next request was answered incorrectly")

    async def _check_holdings(self) -> None:
        """Check that the surviving processes hold no more resources than before."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while excess := _excesses(self._before, await asyncio.to_thread(self.fleet.holdings)):
            if time.monotonic() > deadline:
                self.row.problems.extend(excess)
                return
            await asyncio.sleep(1)


class Watched:
    """A stream whose tokens can be awaited."""

    answer: Answer

    def __init__(self) -> None:
        self._advanced = asyncio.Event()

    def on_event(self, _answer: Answer) -> None:
        """Call this at each event of the stream."""
        self._advanced.set()

    async def tokens(self, count: int, limit_s: float = 60.0) -> None:
        """Wait for the stream's `count`-th token. Raises `TimeoutError`."""
        async with asyncio.timeout(limit_s):
            while self.answer.num_tokens < count:
                self._advanced.clear()
                await self._advanced.wait()


def _excesses(before: dict[int, Holding], after: dict[int, Holding]) -> list[str]:
    return [line for pid in before.keys() & after.keys() for line in _excess(pid, before[pid], after[pid])]


def _excess(pid: int, before: Holding, after: Holding) -> list[str]:
    lines = []
    fds, mib = (_PROXY_FD_SLACK, _PROXY_MEMORY_SLACK_MIB) if after.is_proxy else (_FD_SLACK, _MEMORY_SLACK_MIB)
    if after.fds > before.fds + fds:
        lines.append(f"process {pid}: {before.fds} file descriptors before, {after.fds} after")
    if after.threads > before.threads + _THREAD_SLACK:
        lines.append(f"process {pid}: {before.threads} threads before, {after.threads} after")
    if after.tasks > before.tasks + _TASK_SLACK:
        lines.append(f"process {pid}: {before.tasks:.0f} tasks before, {after.tasks:.0f} after")
    if after.rss_mib > before.rss_mib * (1 + _MEMORY_SLACK) + mib:
        lines.append(f"process {pid}: {before.rss_mib:.0f} MiB before, {after.rss_mib:.0f} after")
    return lines
