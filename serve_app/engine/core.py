"""The step loop: schedule, run, commit, report. Synchronous, in one object, without threads.

Decides how an engine is built (model, measured KV pool, scheduler), and the order within a step.
The scheduler decides which requests run, and the runner how. Requests come from `AsyncEngine` or
`LLM`.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from serve_app.core.autosize import (
    FOR_FEW,
    NEVER,
    choose_slots,
    choose_step_tokens,
    max_slots,
    measure_draft_cost,
    shorten_step_tokens,
)
from serve_app.core.config import SchedulerConfig, SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import ModelRunnerOutput, TokenDelta
from serve_app.core.sampling_params import Pooling
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_cost import DeviceLimits
from serve_app.core.step_plan import SchedulerOutput
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.grammars import Grammars
from serve_app.grammars.token_set import Vocabulary
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.profiling.limits import measure_limits
from serve_app.model.profiling.memory import size_kv_pool
from serve_app.model.profiling.step_times import StepTimes
from serve_app.model.runner import Launched, ModelRunner, Pending, set_num_threads

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 5.0

OnStep = Callable[[StepRecord], None]
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulerKnobs):
    """The scheduler's knobs, and what an engine is built with.

    - kv_cache_gib: limit of the KV pool (None: no limit on a GPU, 4 GiB on a CPU).
    - memory_fraction: fraction of the memory left after loading and warm-up that the pool may use.
    - gpu_share: fraction of the GPU for this engine, for several engines on one GPU.
    - auto_slots, auto_step_tokens: the engine chooses `max_num_seqs` and `max_num_batched_tokens`
      at start (`core.autosize`); the given values are upper limits.
    - auto_context: the context is shortened to what the KV pool holds.
    - max_num_waiting: requests beyond the slots that an `AsyncEngine` accepts.
    - num_threads: CPU threads of the model (None: torch's default).
    - overlap: launch a step before the previous step's tokens are read; excludes prompt lookup.
      auto: only on a GPU, because on a CPU the model uses the cores.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    kv_cache_gib: float | None = None
    memory_fraction: float = 0.8
    gpu_share: float = 1.0
    auto_slots: bool = False
    auto_step_tokens: bool = False
    auto_context: bool = False
    max_num_waiting: int = 256
    num_threads: int | None = None
    overlap: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded engine for other components. Plain data."""

    name: str
    vocab_size: int
    max_model_len: int
    hidden_size: int
    pooling: Pooling
    """Default pooling of embeddings."""
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    """As configured, or as the engine chose."""
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    backend: str
    largest_step_s: float
    """Duration of a step with the maximum number of tokens, measured at start."""
    quantization: str
    kv_cache_dtype: str
    executor: str
    sampler: str
    """Classes that run the layers and choose tokens.

    At start, faster ones may have been unavailable.
    """
    build: str
    """Everything that computes, including the compiler. Equal builds give equal numbers."""
    limits: DeviceLimits | None = None
    """Measured by `EngineCore.load`."""


@dataclass(slots=True)
class _Step:
    """A step in flight. started_at, schedule_s: start and planning time in seconds.

    pending: set once the whole step is launched.
    """

    output: SchedulerOutput
    launched: Launched
    started_at: float
    schedule_s: float
    pending: Pending | None = None


class EngineCore:
    """A model and its scheduler.

    Not thread-safe, except for `prepare`: use it on the thread that builds it.
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig,
        *,
        on_step: OnStep | None = None,
        on_progress: OnProgress | None = None,
        limits: DeviceLimits | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Warm up `model`, size its KV pool and allocate it.

        vocabulary: the tokenizer's, read at the first request with a grammar. None: such requests
        fail. Raises `ConfigError` if the memory is too small.
        """
        progress = on_progress or (lambda _: None)
        self.clock = clock
        self._on_step = on_step
        self._observer_failed = False
        self._cost = model.cost
        self._overlap = config.overlap == "on" or (config.overlap == "auto" and model.device.type == "cuda")
        self._in_flight: _Step | None = None
        self._ended_at = 0.0
        self.wake_time: float | None = None
        """When to call `step` again after it has returned None."""
        self.grammars = None if vocabulary is None else Grammars(vocabulary, model.eos_token_ids, model.vocab_size)
        self._runner = ModelRunner(model, config.max_num_seqs, self.grammars)
        progress("warming up")
        self._runner.warm_up()
        times = StepTimes(self._runner, limits)
        if config.auto_step_tokens:
            config = _with_step_tokens(config, model, times, progress)
        longest_s = times.largest(config.max_num_batched_tokens, config.max_num_seqs)
        limits_of_pool = config.kv_cache_gib, config.memory_fraction, config.gpu_share
        num_blocks = size_kv_pool(model, *limits_of_pool, shortens=config.auto_context)
        if config.auto_slots:
            config = _with_slots(config, model, times, num_blocks, progress)
        draft_cost = FOR_FEW
        if self._overlap:
            draft_cost = NEVER
        elif model.device.type == "cpu":
            draft_cost = measure_draft_cost(config.max_num_seqs, config.max_num_batched_tokens, times.decodes)
            progress(str(draft_cost))
        self.config = config
        progress(f"allocating {num_blocks} KV blocks of {model.block_size} tokens")
        # Last, because the system provides the memory in parallel with the code below.
        self._runner.allocate_kv_cache(num_blocks)
        model.capture(config.max_num_seqs, lambda done, of: progress(f"capturing graphs: {done} of {of}"))
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=model.block_size,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=tuple(model.eos_token_ids),
                draft_cost=draft_cost,
                **config.knobs(),
            )
        )
        self.info = _describe(model, config, num_blocks, longest_s, limits)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        on_step: OnStep | None = None,
        on_progress: OnProgress | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> "EngineCore":
        """Load the model of `config` and build the engine. Raises `ConfigError`."""
        if config.num_threads is not None:
            set_num_threads(config.num_threads)
        stage, reported_at = "", 0.0

        def on_load(name: str, fraction: float) -> None:
            nonlocal stage, reported_at
            now = time.monotonic()
            if on_progress is None or (name == stage and now - reported_at < _PROGRESS_PERIOD_S):
                return
            on_progress(f"{name}: {fraction:.0%}" if name == stage else name)
            stage, reported_at = name, now

        model = load_model(config.model, on_load)
        limits = measure_limits(model.device, model.dtype)
        return cls(model, config, on_step=on_step, on_progress=on_progress, limits=limits, vocabulary=vocabulary)

    def prepare(self, request: EngineRequest) -> None:
        """Build the request's grammar in advance, in any thread.

        Otherwise the engine's thread would wait for it. Raises `InvalidRequestError` if no text can
        match the grammar.
        """
        if request.params.grammar is not None and self.grammars is not None:
            self.grammars.matcher(request.params.grammar, request.params.thinking_budget)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Draws a seed if it has none.

        Raises `InvalidRequestError` or `ContextLengthError`.
        """
        request.params.check_dimensions(self.info.hidden_size)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        self._scheduler.add(request, self.clock())

    def abort(self, request_id: str) -> None:
        """End a request in any state. Ignores unknown ids."""
        self._scheduler.abort(request_id)

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Change the scheduler's knobs.

        Raises `ConfigError`, without changes, for knobs that need a restart.
        """
        self._scheduler.reconfigure(knobs)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return self._scheduler.has_unfinished or self._in_flight is not None

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state between steps."""
        return self._scheduler.stats()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the scheduler's invariants are violated. Call it when idle."""
        self._scheduler.check_invariants()

    def step(self, on_scheduled: Callable[[], None] | None = None) -> list[TokenDelta] | None:
        """Run one step and return its outputs.

        With overlap: launch one and finish the previous one. Returns None while requests only wait
        for the admission gate, until `wake_time`. `on_scheduled` is called just before the model
        runs. Raises only if the engine is broken or interrupted; requests in the steps in flight
        are then lost.
        """
        try:
            return self._step(on_scheduled)
        except BaseException:
            self._in_flight = None
            self._scheduler.abandon()
            raise

    def _step(self, on_scheduled: Callable[[], None] | None) -> list[TokenDelta] | None:
        """Run `step` without its cleanup after errors."""
        started_at = self.clock()
        output = self._scheduler.schedule(started_at)
        if on_scheduled is not None:
            on_scheduled()
        step = None
        if output.rows:
            schedule_s = self.clock() - started_at
            step = _Step(output, self._runner.launch(output), started_at, schedule_s)
            if not step.launched.waits:
                self._sample(step)
        due = step
        if self._overlap:
            due, self._in_flight = self._in_flight, step
        if due is not None:
            deltas = self._finish(due, step)
            if step is not None and step.pending is None:
                self._sample(step)
            return deltas
        if step is not None:
            return []
        self.wake_time = self._scheduler.wake_time
        if self._scheduler.has_unfinished and (self.wake_time is None or self.wake_time <= started_at):
            raise RuntimeError("requests wait but none can be scheduled")
        return None

    def _sample(self, step: _Step) -> None:
        """Launch the rest of a step."""
        step.pending = self._runner.finish(step.launched)
        if step.pending.sat_out:
            self._scheduler.sit_out(step.output, step.pending.sat_out)

    def _finish(self, step: _Step, newest: _Step | None) -> list[TokenDelta]:
        """Wait for a step, commit it and report it.

        newest: the last launched step, whose masks may depend on this one.
        """
        assert step.pending is not None
        result = step.pending.resolve()
        resolved_at = self.clock()
        if newest is not None:
            self._runner.tokens_known(newest.launched)
        deltas = self._scheduler.update(step.output, result)
        updated_at = self.clock()
        # A step launched during another one starts when that one ends.
        started_at, self._ended_at = max(step.started_at, self._ended_at), updated_at
        if self._on_step is not None:
            model_s = max(0.0, resolved_at - started_at - step.schedule_s)
            times = (started_at, step.schedule_s, model_s, updated_at - resolved_at)
            self._report(self._on_step, self._record(step.output, deltas, result, times))
        return deltas

    def _record(
        self,
        output: SchedulerOutput,
        deltas: list[TokenDelta],
        result: ModelRunnerOutput,
        times: tuple[float, float, float, float],
    ) -> StepRecord:
        started_at, schedule_s, model_s, update_s = times
        accepted = [max(0, len(token_ids) - 1) for token_ids in result.token_ids]
        num_prefill = sum(row.num_tokens for row in output.rows if row.is_prefill)
        num_bytes, num_flops = self._cost.of(output.rows)
        return StepRecord(
            step=output.step,
            started_at=started_at,
            schedule_s=schedule_s,
            model_s=model_s,
            update_s=update_s,
            rows=output.rows,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=output.num_tokens - num_prefill,
            num_output_tokens=sum(len(delta.token_ids) for delta in deltas),
            prefix_hit_tokens=output.prefix_hit_tokens,
            prefix_queried_tokens=output.prefix_queried_tokens,
            preempted=output.preempted,
            admitted=output.admitted,
            finished=tuple((d.request_id, d.choice, d.finish_reason) for d in deltas if d.finish_reason is not None),
            gate_open=output.gate_open,
            stats=self._scheduler.stats(),
            num_draft_tokens=sum(len(row.draft_token_ids) for row in output.rows),
            num_accepted_tokens=sum(accepted),
            num_forced_tokens=sum(count for row, count in zip(output.rows, accepted, strict=True) if row.forced),
            mask_s=result.mask_s,
            num_bytes=num_bytes,
            num_flops=num_flops,
        )

    def _report(self, observer: OnStep, record: StepRecord) -> None:
        """Call the observer. Its first error is logged; later ones are ignored."""
        try:
            observer(record)
        except Exception:
            if not self._observer_failed:
                self._observer_failed = True
                logger.exception("the on_step observer failed; later failures are not logged")


def _with_step_tokens(config: EngineConfig, model: PagedModel, times: StepTimes, progress: OnProgress) -> EngineConfig:
    """Return `config` with the number of tokens per step that suits this machine."""

    def slots(num_tokens: int) -> int:
        return min(config.max_num_seqs, max_slots(num_tokens)) if config.auto_slots else config.max_num_seqs

    # As with automatic slots, half of a step is left for prompts when all sequences decode.
    least, most = 1 if config.auto_slots else 2 * config.max_num_seqs, config.max_num_batched_tokens
    choose = choose_step_tokens if model.device.type == "cpu" else shorten_step_tokens
    chosen = choose(least, most, lambda tokens: times.largest(tokens, slots(tokens)))
    model.release_unused_memory()  # of larger steps, which will not occur
    progress(str(chosen))
    return replace(
        config, max_num_batched_tokens=chosen.number, max_num_seqs=slots(chosen.number), auto_step_tokens=False
    )


def _with_slots(
    config: EngineConfig, model: PagedModel, times: StepTimes, num_blocks: int, progress: OnProgress
) -> EngineConfig:
    """Return `config` with the number of slots that suits the pool and this machine's speed."""
    pool_tokens = (num_blocks - 1) * model.block_size
    slots = choose_slots(config.max_num_seqs, pool_tokens, times.decodes if model.device.type == "cpu" else None)
    progress(str(slots))
    return replace(config, max_num_seqs=slots.number, auto_slots=False)


def _describe(
    model: PagedModel, config: EngineConfig, num_blocks: int, largest_step_s: float, limits: DeviceLimits | None
) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        hidden_size=model.hidden_size,
        pooling=model.pooling,
        eos_token_ids=tuple(model.eos_token_ids),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=model.block_size,
        num_blocks=num_blocks,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        backend=model.attention_backend,
        quantization=model.quantization,
        kv_cache_dtype=str(model.cache_dtype).removeprefix("torch."),
        executor=type(model.executor).__name__,
        sampler=model.sampler,
        build=model.build,
        largest_step_s=largest_step_s,
        limits=limits,
    )
