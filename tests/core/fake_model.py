"""A model without a network: its "KV" of a token is a hash of the whole prefix, read through the
block table.

Like attention it sees only what the blocks hold; unlike attention it notices at once when a block
holds anything but the row's own prefix. Its next token is a pure function of (prefix, choice), so
every way of scheduling must agree with `expected_output`, which knows no scheduler. It repeats
itself most of the time, so that drafts are often right.
Rows with a grammar sit out one time in four, and say what will follow, which is true most of the
time.
"""

import pickle
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from serve_app.core.config import SchedulerConfig, SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, FinishReason, ModelRunnerOutput, TokenDelta, TokenLogprob
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.errors import EngineError


def chain(parent: int, token_id: int) -> int:
    return int.from_bytes(blake2b(f"{parent},{token_id}".encode(), digest_size=8).digest())


def next_token(token_ids: Sequence[int], state: int, choice: int, vocab_size: int) -> int:
    """What comes after `token_ids`, whose hash is `state`."""
    repeats, token_id = divmod(chain(state, 1000 + choice), vocab_size)
    return token_ids[-3] if repeats % 4 and len(token_ids) >= 3 else token_id


def token_logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -1.0 - token_id)


def expected_output(request: EngineRequest, choice: int, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What `choice` of a fresh `request` must yield."""
    params, state = request.params, 0
    for token_id in request.prompt_token_ids:
        state = chain(state, token_id)
    limit = min(config.max_model_len, (config.num_blocks - 1) * config.block_size + 1) - len(request.prompt_token_ids)
    limit = min(limit, params.max_tokens or limit)
    output: list[int] = []
    while True:
        token_id = next_token([*request.prompt_token_ids, *output], state, choice, config.vocab_size)
        state = chain(state, token_id)
        output.append(token_id)
        stops = token_id in params.stop_token_ids or (token_id in config.eos_token_ids and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == limit:
            return output, FinishReason.LENGTH


@dataclass
class _Slot:
    start: SlotStart
    tokens: list[int]
    table: list[int]
    computed: int | None = None  # unknown until its first row
    sat_out_at: int = 0  # how many tokens it had then


class FakeRunner:
    """Executes scheduler outputs as a model runner does, and checks the contract of every row."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_slots = config.max_num_seqs
        self.slots: dict[int, _Slot] = {}
        # (block id, offset) -> hash of the prefix that ends there
        self.cells: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput, failing: Collection[int] = ()) -> ModelRunnerOutput:
        self._check_limits(output)
        for start in output.slot_starts:
            self.slots[start.slot] = _Slot(start, list(start.token_ids), list(start.block_ids))
        for row in output.rows:
            self.slots[row.slot].table += row.new_block_ids
        self._copy_blocks(output)
        self._check_writes(output.rows)
        sat_out = frozenset(i for i, row in enumerate(output.rows) if self._sits_out(row))
        sampled = [self._run(row, sits_out=i in sat_out) for i, row in enumerate(output.rows)]
        good = {i: ids for i, ids in enumerate(sampled) if i not in failing}
        return ModelRunnerOutput(
            token_ids=tuple(good.get(i, ()) for i in range(len(sampled))),
            results={i: {LOGPROBS: tuple(map(token_logprob, ids))} for i, ids in good.items() if ids},
            prompt_results={
                i: {LOGPROBS: tuple(map(token_logprob, self._predicted_prompt(row)))}
                for i, row in enumerate(output.rows)
                if self.slots[row.slot].start.params.prompt_logprobs is not None
            },
            failed={i: EngineError("injected") for i in failing},
            sat_out=sat_out,
            forced={
                i: guess for i, row in enumerate(output.rows) if i in good and good[i] and (guess := self._forced(row))
            },
        )

    def _sits_out(self, row: ScheduledRequest) -> bool:
        slot = self.slots[row.slot]
        known = len(slot.tokens)
        if slot.start.params.grammar is None or not row.samples or slot.sat_out_at == known:
            return False
        if chain(known, slot.start.token_ids[0]) % 4:
            return False
        slot.sat_out_at = known
        return True

    def _forced(self, row: ScheduledRequest) -> tuple[int, ...]:
        """Up to three tokens that will follow; every fifth guess is wrong."""
        slot = self.slots[row.slot]
        if slot.start.params.grammar is None:
            return ()
        tokens, state = list(slot.tokens), 0
        for token_id in tokens:
            state = chain(state, token_id)
        for _ in range(chain(state, 7) % 4):
            token_id = next_token(tokens, state, row.choice, self.config.vocab_size)
            tokens.append((token_id + (chain(state, 8) % 5 == 0)) % self.config.vocab_size)
            state = chain(state, tokens[-1])
        return tuple(tokens[len(slot.tokens) :])

    def _check_limits(self, output: SchedulerOutput) -> None:
        assert sum(row.num_tokens for row in output.rows) == output.num_tokens <= self.config.max_num_batched_tokens
        slots = [row.slot for row in output.rows]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.num_slots for slot in slots)
        assert len(slots) <= self.config.max_num_seqs
        starts = [(start.slot, start.request_id, start.choice) for start in output.slot_starts]
        assert set(starts) <= {(row.slot, row.request_id, row.choice) for row in output.rows}
        assert [start[1:] for start in starts] == list(output.admitted)
        assert not (output.preempted and output.admitted), "a step that preempted admits nothing"
        if self.config.prefill == "separate":
            assert len({row.is_prefill for row in output.rows}) <= 1, "prefills and decodes share no step"

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        targets = [copy.target for copy in output.block_copies]
        assert len(set(targets)) == len(targets)
        assert not {copy.source for copy in output.block_copies} & set(targets), "the order of copies must not matter"
        for copy in output.block_copies:
            for offset in range(self.config.block_size):
                if (copy.source, offset) in self.cells:
                    self.cells[copy.target, offset] = self.cells[copy.source, offset]

    def _cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.config.block_size)
        return slot.table[index], offset

    def _check_writes(self, rows: Iterable[ScheduledRequest]) -> None:
        written = [
            self._cell(self.slots[row.slot], position)
            for row in rows
            for position in range(row.start, row.start + row.num_tokens)
        ]
        assert len(set(written)) == len(written), "two rows write the same place"
        assert all(block for block, _ in written), "the null block is never written"

    def _run(self, row: ScheduledRequest, *, sits_out: bool) -> tuple[int, ...]:
        slot = self.slots[row.slot]
        assert (slot.start.request_id, slot.start.choice) == (row.request_id, row.choice)
        assert slot.computed in (None, row.start), "each row continues where the last one ended"
        drafts = row.draft_token_ids
        end = row.start + row.num_tokens - len(drafts)
        assert row.start < end <= len(slot.tokens)
        assert row.samples == (end == len(slot.tokens))
        assert row.is_prefill == (row.start < len(slot.start.token_ids))
        assert not drafts or (row.samples and not row.is_prefill), "drafts follow the last known token of a decode"
        states = [0]
        for position, token_id in enumerate([*slot.tokens[:end], *drafts]):
            states.append(chain(states[-1], token_id))
            if position < row.start:
                assert self.cells.get(self._cell(slot, position)) == states[-1], "a block holds somebody else's prefix"
            else:
                self.cells[self._cell(slot, position)] = states[-1]
        slot.computed = end - sits_out
        if not row.samples or sits_out:
            return ()
        sampled: list[int] = []
        for state, draft in zip(states[end:], [*drafts, -1], strict=True):
            sampled.append(next_token([*slot.tokens, *sampled], state, row.choice, self.config.vocab_size))
            if sampled[-1] != draft:
                break
        slot.tokens += sampled
        slot.computed += len(sampled) - 1
        return tuple(sampled)

    def _predicted_prompt(self, row: ScheduledRequest) -> tuple[int, ...]:
        start = self.slots[row.slot].start
        first = max(row.start + 1, start.params.prompt_logprobs_from)
        return start.token_ids[: start.num_prompt_tokens][first : row.start + row.num_tokens + 1]


@dataclass
class Stream:
    """What a reader has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: str | None = None

    def receive(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "news after the end"
        assert delta.offset == len(self.token_ids), "tokens are lost or doubled"
        assert delta.logprobs == tuple(map(token_logprob, delta.token_ids))
        if delta.num_cached_tokens is not None:
            assert self.num_cached_tokens is None
            self.num_cached_tokens = delta.num_cached_tokens
        self.token_ids += delta.token_ids
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.error = None if delta.error is None else delta.error.message


class Driver:
    """A scheduler, a runner and the readers of all streams; checks the scheduler's state after
    every call.

    Every call also goes to a twin: same calls, same outputs. With `overlap` a step is planned and
    run before the one before it is committed.
    """

    def __init__(self, config: SchedulerConfig, *, overlap: bool = False) -> None:
        self.config = config
        self.overlap = overlap
        self.in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self.scheduler = Scheduler(config)
        self.twin = Scheduler(config)
        self.runner = FakeRunner(config)
        self.streams: dict[tuple[str, int], Stream] = {}
        self.outputs: list[SchedulerOutput] = []
        self.now = 0.0

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        self.scheduler.reconfigure(knobs)
        self.twin.reconfigure(knobs)
        self.scheduler.check_invariants()
        self.config = self.runner.config = self.scheduler.config

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request, self.now)
        self.twin.add(request, self.now)
        self.scheduler.check_invariants()
        prior = request.prior_output_ids or ((),) * request.params.n
        for choice, token_ids in enumerate(prior):
            self.streams[request.request_id, choice] = Stream(token_ids=list(token_ids))

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.twin.abort(request_id)
        self.scheduler.check_invariants()
        for key in [key for key in self.streams if key[0] == request_id]:
            del self.streams[key]

    def step(
        self,
        failing: Callable[[SchedulerOutput], Collection[int]] = lambda output: (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> SchedulerOutput:
        """Plan and run a step, and commit it, or with overlap the one before; `meanwhile` runs
        while in flight."""
        named = set(self.scheduler._kv.prefix_cache._blocks)
        output = self.scheduler.schedule(self.now)
        assert self.twin.schedule(self.now) == output
        self.scheduler.check_invariants()
        assert set(self.scheduler._kv.prefix_cache._blocks) <= named, "planning published a block"
        output = pickle.loads(pickle.dumps(output))
        self._check_tokens_in_flight(output)
        step = output, self.runner.execute(output, failing(output))
        samples_late = any(row.waits for row in output.rows)
        if not samples_late:
            self._sit_out(*step)
        meanwhile()
        if self.overlap:
            due, self.in_flight = self.in_flight, step if output.rows else None
        else:
            due = step
        if due is not None:
            self._commit(*due)
        if samples_late:
            self._sit_out(*step)
        self.outputs.append(output)
        return output

    def _sit_out(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A runner knows of such rows as soon as it has launched the step."""
        if result.sat_out:
            self.scheduler.sit_out(output, result.sat_out)
            self.twin.sit_out(output, result.sat_out)
            self.scheduler.check_invariants()

    def _check_tokens_in_flight(self, output: SchedulerOutput) -> None:
        sampled = set()
        if self.in_flight is not None:
            before, result = self.in_flight
            sampled = {
                (row.slot, row.request_id, row.choice)
                for i, row in enumerate(before.rows)
                if row.samples and i not in result.sat_out
            }
        sampled -= {(start.slot, start.request_id, start.choice) for start in output.slot_starts}
        for row in output.rows:
            assert row.token_in_flight == ((row.slot, row.request_id, row.choice) in sampled)

    def settle(self) -> None:
        """Commit the step in flight, if there is one."""
        due, self.in_flight = self.in_flight, None
        if due is not None:
            self._commit(*due)

    def _commit(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        deltas = self.scheduler.update(output, result)
        assert self.twin.update(output, result) == deltas
        for delta in deltas:
            self.streams[delta.request_id, delta.choice].receive(delta)
        self.scheduler.check_invariants()

    def drain(self, max_steps: int = 5000) -> None:
        """Step until all is done; time passes only where the scheduler waits for it."""
        while self.scheduler.has_unfinished:
            was_idle = self.in_flight is None
            output = self.step()
            if not output.rows and was_idle and self.scheduler.has_unfinished:
                wake_time = self.scheduler.wake_time
                assert wake_time is not None, "only an incomplete static batch lets an idle scheduler wait"
                assert wake_time > self.now, "time would not help"
                self.now = wake_time
            max_steps -= 1
            assert max_steps > 0, "no progress"
        self.settle()
        assert self.scheduler.stats().blocks_used == 0

    def run(self, *requests: EngineRequest) -> dict[tuple[str, int], Stream]:
        for request in requests:
            self.add(request)
        self.drain()
        return self.streams

    def check_outputs(self, *requests: EngineRequest) -> None:
        """Every stream of `requests` equals what the model yields alone."""
        for request in requests:
            for choice in range(request.params.n):
                stream = self.streams[request.request_id, choice]
                expected = expected_output(request, choice, self.config)
                assert (stream.token_ids, stream.finish_reason) == expected, (request, choice)
                asked = request.params.prompt_logprobs is not None and choice == 0
                prompt = request.prompt_token_ids[request.params.prompt_logprobs_from :]
                expected_prompt = [token_logprob(t) for t in prompt if asked]
                assert stream.prompt_logprobs == expected_prompt, (request, choice)
