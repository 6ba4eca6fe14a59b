"""The scheduler's invariants under arbitrary workloads, against a model that notices any wrong
block."""

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.config import SchedulerConfig, SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import SchedulerOutput
from tests.core.fake_model import Driver
from tests.examples import examples

VOCAB = 11
EOS = 3
MAX_MODEL_LEN = 24


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 5))
    smallest_pool = -(-MAX_MODEL_LEN // block_size) + 1
    return SchedulerConfig(
        num_blocks=draw(st.integers(smallest_pool, 2 * smallest_pool)),
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 10)),
        policy=draw(st.sampled_from(["fcfs", "priority", "static"])),
        prefill=draw(st.sampled_from(["fused", "separate"])),
        waiting_served_ratio=draw(st.sampled_from([0.0, 0.5, 2.0])),
        max_wait_s=draw(st.sampled_from([0.0, 2.0, 50.0])),
        max_waiting_steps=draw(st.sampled_from([1, 3, 50])),
        enable_prefix_cache=draw(st.booleans()),
        speculation=draw(st.sampled_from(["auto", "off"])),
    )


def live_knobs(built: SchedulerConfig) -> st.SearchStrategy[SchedulerKnobs]:
    """Whatever an engine built with `built` may go on with."""

    @st.composite
    def draw_knobs(draw: st.DrawFn) -> SchedulerKnobs:
        max_num_seqs = draw(st.integers(1, built.max_num_seqs))
        changes = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, built.max_num_batched_tokens)),
            "prefill": draw(st.sampled_from(["fused", "separate"])),
            "waiting_served_ratio": draw(st.sampled_from([0.0, 0.5, 2.0])),
            "max_wait_s": draw(st.sampled_from([0.0, 2.0, 50.0])),
            "max_waiting_steps": draw(st.sampled_from([1, 3, 50])),
            "speculation": draw(st.sampled_from(["auto", "off"])),
        }
        return SchedulerKnobs(**built.knobs() | changes)

    return draw_knobs()


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    # Few token values and one common stem: shared prefixes are the rule.
    stem = draw(st.sampled_from([(1,), (1, 2, 1, 2, 1, 2, 1, 2)]))
    prompt = stem + tuple(draw(st.lists(st.integers(0, 2), max_size=6)))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, MAX_MODEL_LEN - len(prompt))))
    grammar = draw(st.sampled_from([None, None, "any"]))
    return EngineRequest(
        request_id="",
        prompt_token_ids=prompt,
        params=SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 4])),
            max_tokens=max_tokens,
            min_tokens=0 if grammar else draw(st.integers(0, min(3, max_tokens or 3))),
            ignore_eos=False if grammar else draw(st.booleans()),
            grammar=grammar,
            stop_token_ids=draw(st.sampled_from([(), (5,)])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            prompt_logprobs_from=draw(st.sampled_from([1, 1, 2, 9])),
        ),
        cache_salt=draw(st.sampled_from(["", "tenant"])),
        priority=draw(st.integers(0, 2)),
    )


workloads = st.lists(requests(), min_size=1, max_size=10).map(
    lambda items: [replace(item, request_id=f"r{i}") for i, item in enumerate(items)]
)


class WatchfulDriver(Driver):
    """Checks in every step that nobody who is overdue stays out while there is room."""

    starts_since_decodes = 0

    def step(
        self,
        failing: Callable[[SchedulerOutput], Collection[int]] = lambda output: (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> SchedulerOutput:
        last_of_group = self.scheduler._gate._last_of_group
        if all(request.is_prefilling for request in self.scheduler._running):
            self.starts_since_decodes = 0  # nobody waits for them

        def check(output: SchedulerOutput) -> Collection[int]:
            if self.in_flight is None or output.rows:  # else that one is to be committed first
                self._check_room(output, last_of_group)
                if any(not row.is_prefill for row in output.rows):
                    self.starts_since_decodes = 0
                self.starts_since_decodes += len(output.admitted)
            return failing(output)

        return super().step(check, meanwhile)

    def _check_room(self, output: SchedulerOutput, last_of_group: int) -> None:
        """The one excuse, with separate prefill: somebody has started since the last decodes, so
        that these come before another group, and before any more than `max_num_seqs` starts. They
        come in this step, or after the prefills that it goes on with; the step after them has no
        excuse."""
        config, started = self.config, self.starts_since_decodes + len(output.admitted)
        last_of_group = max(last_of_group, self.scheduler._gate._last_of_group)
        newcomer = self.scheduler._queue.new_head
        group_is_in = newcomer is None or newcomer.arrival > last_of_group
        decodes_first = config.prefill == "separate" and (
            (started > 0 and group_is_in) or started >= config.max_num_seqs
        )
        overdue = self.now >= self.scheduler._queue.oldest_arrival + config.max_wait_s
        if not overdue or config.policy == "static" or output.preempted or decodes_first:
            return
        head = self.scheduler._queue.head(gate_open=True)
        assert head is not None
        needed = min(
            -(-head.num_tokens // config.block_size) - sum(block.ref_count > 0 for block in prefix.shared)
            for prefix in self.scheduler._kv.find_prefixes(head)
        )
        assert (
            len(self.scheduler._running) == config.max_num_seqs
            or output.num_tokens == config.max_num_batched_tokens
            or needed + len(self.scheduler._running) > self.scheduler._kv.pool.num_free
        )


@given(configs(), st.lists(st.tuples(requests(), st.integers(0, 6)), min_size=2, max_size=10), st.booleans())
@settings(max_examples=examples(100))
def test_nobody_overdue_stays_out_while_there_is_room(
    config: SchedulerConfig, workload: list[tuple[EngineRequest, int]], overlap: bool
) -> None:
    """Where nothing but the time that somebody has waited opens the gate."""
    config = replace(config, policy="fcfs", waiting_served_ratio=99.0, max_waiting_steps=999, max_wait_s=2.0)
    driver = WatchfulDriver(config, overlap=overlap)
    for i, (request, steps) in enumerate(workload):
        driver.add(replace(request, request_id=f"r{i}"))
        for _ in range(steps):
            driver.step()
            driver.now += 0.5
    while driver.scheduler.has_unfinished:
        driver.step()
        driver.now += 0.5


@given(configs(), workloads, st.booleans())
@settings(max_examples=examples(250))
def test_outputs_are_those_of_each_request_alone(
    config: SchedulerConfig, workload: list[EngineRequest], overlap: bool
) -> None:
    driver = Driver(config, overlap=overlap)
    driver.run(*workload)
    driver.check_outputs(*workload)


@given(configs(), workloads, st.integers(1, 40), st.booleans())
@settings(max_examples=examples(100))
def test_failover_after_any_step_changes_no_token(
    config: SchedulerConfig, workload: list[EngineRequest], steps: int, overlap: bool
) -> None:
    first = Driver(config, overlap=overlap)
    for request in workload:
        first.add(request)
    for _ in range(steps):
        if not first.step().rows:
            first.now += config.max_wait_s
    second = Driver(config, overlap=overlap)
    second.streams = first.streams
    for request in workload:
        keys = [(request.request_id, choice) for choice in range(request.params.n)]
        streams = [first.streams[key] for key in keys]
        if all(stream.finish_reason is not None for stream in streams):
            continue
        second.add(replace(request, prior_output_ids=tuple(tuple(stream.token_ids) for stream in streams)))
        # `add` made new streams from the prior tokens; prompt logprobs come again only if no output
        # had come.
        if streams[0].token_ids:
            second.streams[keys[0]].prompt_logprobs = streams[0].prompt_logprobs
    second.drain()
    second.check_outputs(*workload)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts (also with a step in flight), failing rows, other knobs and passing time, in
    any order; with and without a step that is always in flight."""

    driver: Driver

    @initialize(config=configs(), overlap=st.booleans())
    def start(self, config: SchedulerConfig, overlap: bool) -> None:
        self.built_with = config
        self.driver = WatchfulDriver(config, overlap=overlap)
        self.alive: dict[str, EngineRequest] = {}
        self.num_requests = 0

    @rule(request=requests())
    def add(self, request: EngineRequest) -> None:
        self.num_requests += 1
        self._add(replace(request, request_id=f"r{self.num_requests}"))

    def _add(self, request: EngineRequest) -> None:
        self.alive[request.request_id] = request
        self.driver.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(data.draw(st.sampled_from(sorted(self.alive))))

    def _abort(self, request_id: str) -> None:
        del self.alive[request_id]
        self.driver.abort(request_id)

    @rule(data=st.data())
    def reconfigure(self, data: st.DataObject) -> None:
        self.driver.reconfigure(data.draw(live_knobs(self.built_with)))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), again=st.booleans())
    def abort_in_flight(self, data: st.DataObject, again: bool) -> None:
        """The aborted id may even come back before the step returns: it must not inherit
        anything."""
        request = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]

        def meanwhile() -> None:
            self._abort(request.request_id)
            if again:
                self._add(request)

        self.driver.step(meanwhile=meanwhile)

    @rule(data=st.data())
    def step_with_a_failing_row(self, data: st.DataObject) -> None:
        failed: set[tuple[str, int]] = set()

        def failing(output: SchedulerOutput) -> list[int]:
            if not output.rows:
                return []
            row = data.draw(st.integers(0, len(output.rows) - 1))
            failed.add((output.rows[row].request_id, output.rows[row].choice))
            return [row]

        self.driver.step(failing)
        self.driver.settle()
        for request_id, choice in failed:
            end = self.driver.streams[request_id, choice].finish_reason
            if self.driver.overlap and end in (FinishReason.STOP, FinishReason.LENGTH):
                continue  # its last token was in flight: the row that failed was for nothing
            request = self.alive.pop(request_id)
            ends = [self.driver.streams[request_id, choice].finish_reason for choice in range(request.params.n)]
            assert FinishReason.ERROR in ends
            assert None not in ends

    @invariant()
    def books_balance(self) -> None:
        self.driver.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check_outputs(*self.alive.values())


SchedulerMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=30)


@pytest.mark.timeout(120)
class TestSchedulerMachine(SchedulerMachine.TestCase):
    pass
