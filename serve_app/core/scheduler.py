"""The scheduler: which requests compute which tokens in the next step.

A pure state machine; time is an argument. Deterministic: the same calls give the same outputs. Does
not decide about text, sampling or the device.

There is no prefill phase and no decode phase: every request has `num_computed_tokens`, which
catches up with `num_tokens`. Chunked prefill, prefix hits, forks, preemption and failover follow
from this one rule.

`schedule` plans and allocates, `update` commits; only `update` publishes prefix blocks. Order
inside `schedule`: running requests (decodes, which may preempt; then prefill chunks), the admission
gate, then the queue while tokens, slots and blocks last; then drafts. With `prefill: separate`,
decodes come last, in steps without any prefill; the gate ensures that there are such steps.

Decodes include draft tokens (see `drafts`), which the runner verifies, if prompts leave room in the
step. Drafts never cause a preemption and never take the last free blocks.

A step may be planned while the previous one is in flight. Rows of requests in both steps then start
from a token whose id is not known yet. If the row's allowed tokens depend on that id (a grammar's
mask), the runner samples after the commit. If the request has ended meanwhile, its row's result is
dropped. Its blocks are freed at once, because the device runs steps in order.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter

from serve_app.core.admission_gate import make_gate
from serve_app.core.config import SchedulerConfig, SchedulerKnobs
from serve_app.core.drafts import add_drafts
from serve_app.core.kv_cache_manager import KVCacheManager
from serve_app.core.request import EngineRequest, Request, RequestStatus, make_choices
from serve_app.core.request_queue import RequestQueue, pick_victim
from serve_app.core.results import NO_RESULTS, FinishReason, ModelRunnerOutput, TokenDelta
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput, StepPlan
from serve_app.core.step_record import SchedulerStats
from serve_app.errors import EngineError, InvalidRequestError, RequestError

_by_order = attrgetter("order")


def _token_error(
    row: ScheduledRequest, sat_out: bool, token_ids: tuple[int, ...], vocab_size: int
) -> EngineError | None:
    samples = row.samples and not sat_out
    most = len(row.draft_token_ids) + 1 if samples else 0
    if not samples <= len(token_ids) <= most:
        return EngineError(f"the model runner returned {len(token_ids)} tokens for a row that samples at most {most}")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            return EngineError(f"the model runner returned token id {token_id}, outside the vocabulary")
    return None


def _must_wait(in_flight: StepPlan, running: Sequence[Request], kv: KVCacheManager, max_num_seqs: int) -> bool:
    """Whether the step in flight must be committed before the next one is planned.

    Either the ends of rows with drafts are unknown, or a request would be preempted, which the
    commit may make unnecessary.
    """
    if len(running) > max_num_seqs or any(row.draft_token_ids for row in in_flight.rows):
        return True
    return kv.pool.num_free < len(running) and not kv.can_all_grow(request for request in running if request.can_decode)


class Scheduler:
    """Continuous batching over a paged KV cache.

    For the rules see the module; for the knobs `SchedulerKnobs`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._built_with = config
        self._kv = KVCacheManager(config)
        self._queue = RequestQueue()
        self._gate = make_gate(config)
        self._running: list[Request] = []  # sorted by order: the last is preempted first
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest is taken first
        self._choices: dict[str, list[Request]] = {}
        self._early_deltas: list[TokenDelta] = []
        self._in_flight: deque[tuple[int, StepPlan]] = deque()
        self._num_arrivals = 0
        self._num_steps = 0

    def add(self, request: EngineRequest, now: float) -> None:
        """Enqueue a request that arrives at `now` (seconds, must not go backwards).

        Raises InvalidRequestError or ContextLengthError for requests that can never run: token ids
        outside the vocabulary, more tokens than context or pool allow, an id in use. With
        `max_tokens` None, context and pool limit the output. The next `update` reports choices that
        an earlier replica completed.
        """
        if request.request_id in self._choices:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        choices = make_choices(request, self.config, self._num_arrivals, now)
        self._num_arrivals += 1
        self._choices[request.request_id] = choices
        for choice in choices:
            if choice.status is RequestStatus.FINISHED:
                self._early_deltas.append(choice.delta((), choice.finish_reason() or FinishReason.STOP))
            elif choice.status is RequestStatus.WAITING:
                self._queue.push(choice, resuming=False)

    def abort(self, request_id: str) -> None:
        """End all choices of a request, without deltas. Drops its results of steps in flight."""
        for choice in self._choices.pop(request_id, ()):
            self._release(choice)
        self._early_deltas = [delta for delta in self._early_deltas if delta.request_id != request_id]

    def abandon(self) -> None:
        """Drop the steps in flight, whose results will never arrive, and abort their requests."""
        for _, plan in self._in_flight:
            for request in plan.requests:
                if request.status is RequestStatus.RUNNING:
                    self.abort(request.request_id)
        self._in_flight.clear()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._choices)

    @property
    def wake_time(self) -> float | None:
        """When to plan again after a plan without rows; None: when requests come or go."""
        return self._gate.wake_time(self._queue)

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Change the knobs from the next `schedule` on.

        Raises ConfigError, without changes, for knobs that cannot change. If `max_num_seqs` is
        lowered, excess running requests are preempted, youngest first. They lose no token.
        """
        self._built_with.check_change(knobs)
        self.config = replace(self.config, **knobs.knobs())
        self._gate.reconfigure(knobs)

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step. Call `update` for it unless it has no rows.

        One step may be in flight. Then a plan without rows means that this step must be committed
        first.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("schedule() while two steps are in flight: call update() first")
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self._in_flight and _must_wait(self._in_flight[0][1], self._running, self._kv, self.config.max_num_seqs):
            return plan.finish(self._num_steps, (), gate_open=False)
        while len(self._running) > self.config.max_num_seqs:
            self._preempt(pick_victim(self._running), plan)
        # Without requests that can decode, this plans nothing but informs the gate.
        if self.config.prefill == "fused" or all(request.is_prefilling for request in self._running):
            self._schedule_decodes(plan)
        plan.add_prefills(self._running)
        gate_open = self._gate.update(now, self._queue, len(self._running))
        if not plan.preempted:
            self._admit(plan, now)
        if self.config.prefill == "separate" and not plan.rows:
            self._schedule_decodes(plan)
        add_drafts(plan, self.config, self._kv, len(self._running))
        output = plan.finish(self._num_steps, self._kv.take_copies(), gate_open)
        if plan.rows:
            self._in_flight.append((output.step, plan))
            self._num_steps += 1
            self._gate.step_done()
        return output

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Add a token for each request whose known tokens are computed, in order of service.

        If a block is missing, a request is preempted. The victim is the last in order of service,
        so it has no row in this step yet.
        """
        self._gate.decodes_planned()
        decodes = [request for request in self._running if request.can_decode]
        for request in decodes:
            if plan.preempted and request.status is not RequestStatus.RUNNING:
                return
            while (new_block_ids := self._kv.grow(request, 1)) is None:
                self._preempt(pick_victim(self._running), plan)
                if request.status is not RequestStatus.RUNNING:
                    return
            plan.add_row(request, new_block_ids)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._leave_slot(request)
        request.status = RequestStatus.WAITING
        self._queue.push(request, resuming=True)
        plan.preempted.append((request.request_id, request.choice))

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Start requests from the queue.

        The head blocks later requests, so that no request is overtaken forever.
        """
        while plan.budget > 0 and not self._gate.decodes_are_due:
            request = self._gate.next_in(now, self._queue, len(self._running))
            if request is None:
                return
            if len(self._running) >= self.config.max_num_seqs or not self._start(request, plan):
                self._gate.close()
                return

    def _start(self, request: Request, plan: StepPlan) -> bool:
        """Give `request` a slot, blocks for all its known tokens, and a row.

        Returns False if there are too few blocks. The whole table is allocated at once, so a
        started prompt never waits for blocks. One block per running request stays free; otherwise
        the next decodes would preempt the new request at once.
        """
        reserve, prefixes = len(self._running), self._kv.find_prefixes(request)
        prefix = next((prefix for prefix in prefixes if self._kv.allocate(request, prefix, reserve)), None)
        if prefix is None:
            return False
        self._queue.remove(request)
        self._gate.started()
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens)
            if request.leader is None:
                self._gate.admitted()
        if prefix.searched:
            plan.queried_tokens += request.num_tokens
            plan.hit_tokens += prefix.num_tokens
        request.status = RequestStatus.RUNNING
        request.slot = heappop(self._free_slots)
        request.num_prefill_tokens = request.num_tokens
        insort(self._running, request, key=_by_order)
        plan.add_start(request)
        plan.add_row(request)
        return True

    def sit_out(self, output: SchedulerOutput, rows: Collection[int]) -> None:
        """Mark rows of the newest step in flight that will yield no token.

        The next plan repeats them.
        """
        step, plan = self._in_flight[-1]
        if step != output.step:
            raise RuntimeError(f"sit_out() for step {output.step}, which is not the newest in flight")
        for index in rows:
            if plan.requests[index].status is RequestStatus.RUNNING:  # else it has ended
                plan.sit_out(index)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[TokenDelta]:
        """Commit a finished step: append tokens, publish full blocks, end finished choices.

        Returns deltas in row order. A row that `failed`, or that returned a wrong number of ids or
        an id outside the vocabulary, ends its request (all choices) with ERROR. For a step that
        failed as a whole, mark every row failed.
        """
        deltas, self._early_deltas = self._early_deltas, []
        if output.rows:
            if not self._in_flight or self._in_flight[0][0] != output.step:
                raise RuntimeError(f"update() for step {output.step}, which is not the oldest in flight")
            _, plan = self._in_flight.popleft()
            for i, (row, request) in enumerate(zip(output.rows, plan.requests, strict=True)):
                if request.status is RequestStatus.RUNNING:  # else aborted or failed meanwhile
                    plan.end_row(i)
                    self._commit_row(i, row, request, result, deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget_if_done(delta.request_id)
        return deltas

    def _commit_row(
        self, i: int, row: ScheduledRequest, request: Request, result: ModelRunnerOutput, deltas: list[TokenDelta]
    ) -> None:
        token_ids = result.token_ids[i]
        error = result.failed.get(i) or _token_error(row, request.sat_out, token_ids, self.config.vocab_size)
        if error is not None:
            self._fail(request.request_id, error, deltas)
            return
        token_ids, finish_reason = request.append(token_ids)
        request.forced = result.forced.get(i, ())
        # Rejected drafts do not count as computed: their positions are overwritten.
        request.num_computed_tokens = request.num_tokens - 1 if row.samples else row.start + row.num_tokens
        self._kv.publish(request)
        if row.is_prefill and request.leader is None and request.num_computed_tokens >= request.num_prompt_tokens:
            self._release_forks(request)
        prompt_results = result.prompt_results.get(i, NO_RESULTS)
        if prompt_results:
            prompt_results = request.take_prompt_results(prompt_results, row.start)
        if not token_ids and not prompt_results:
            return
        deltas.append(request.delta(token_ids, finish_reason, result.results.get(i, NO_RESULTS), prompt_results))
        if finish_reason is not None:
            self._release(request)

    def _release_forks(self, leader: Request) -> None:
        """Queue the other choices: the prompt is computed, so they may share it now."""
        for choice in self._choices[leader.request_id]:
            if choice.status is RequestStatus.FORKING:
                choice.status = RequestStatus.WAITING
                self._queue.push(choice, resuming=True)

    def _fail(self, request_id: str, error: RequestError, deltas: list[TokenDelta]) -> None:
        for choice in self._choices[request_id]:
            if choice.status is not RequestStatus.FINISHED:
                self._release(choice)
                deltas.append(choice.delta((), FinishReason.ERROR, error=error))

    def _release(self, request: Request) -> None:
        """Remove an unfinished choice from its slot or the queue."""
        if request.status is RequestStatus.RUNNING:
            self._leave_slot(request)
        elif request.status is RequestStatus.WAITING:
            self._queue.remove(request)
        request.status = RequestStatus.FINISHED

    def _leave_slot(self, request: Request) -> None:
        del self._running[bisect_left(self._running, request.order, key=_by_order)]
        self._kv.free(request)
        heappush(self._free_slots, request.slot)
        request.slot = -1

    def _forget_if_done(self, request_id: str) -> None:
        choices = self._choices.get(request_id, ())
        if all(choice.status is RequestStatus.FINISHED for choice in choices):
            self._choices.pop(request_id, None)

    def stats(self) -> SchedulerStats:
        """Return queue length, slots and blocks in use.

        Further choices count as waiting once their prompt is computed.
        """
        total, used, cached = self._kv.pool.usage()
        return SchedulerStats(len(self._queue), len(self._running), total, used, cached)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state is inconsistent.

        Visits the whole pool and all tables: for tests and idle moments.
        """
        _check(self)


def _check(scheduler: Scheduler) -> None:
    running = scheduler._running
    scheduler._kv.check_invariants(running)
    orders = [request.order for request in running]
    assert orders == sorted(set(orders)), "running requests are out of order"
    slots = sorted([*scheduler._free_slots, *(request.slot for request in running)])
    assert slots == list(range(scheduler._built_with.max_num_seqs)), "a slot is lost or held twice"
    known = [choice for choices in scheduler._choices.values() for choice in choices]
    assert set(running) == {c for c in known if c.status is RequestStatus.RUNNING}, "running and status disagree"
    waiting = [c for c in known if c.status is RequestStatus.WAITING]
    assert len(waiting) == len(scheduler._queue), "queue and status disagree"
    assert all(choice in scheduler._queue for choice in waiting), "queue and status disagree"
    for request in known:
        is_running = request.status is RequestStatus.RUNNING
        assert is_running or not request.blocks, f"{request.request_id} has blocks but does not run"
        assert not is_running or request.num_computed_tokens < request.num_tokens, "nothing left to compute"
