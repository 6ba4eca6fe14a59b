"""The measurements of `serve-app compare`, each in a fresh process.

Decides what is measured and keeps it fair. Every way to batch loads the model anew and warms up
with the same requests. All requests are available when its clock starts, and the clock stops at the
last token. Draws nothing.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.errors import ServeAppError
from serve_app.experiments.padding import PaddedStep
from serve_app.observability.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    from serve_app.engine.core import EngineCore
    from serve_app.experiments.padded import PaddedGenerator
    from serve_app.model.paged_model import PagedModel

_WARM_UP_TOKENS = 4

OnTokens = Callable[[int], None]


class StepEngine(Protocol):
    """Takes requests and computes them step by step: our engine or its padded predecessor."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[TokenDelta] | None:
        """Run one forward pass and return its tokens. None if requests only wait for a static batch
        to fill.
        """
        ...


class Mode(StrEnum):
    """The ways to batch. The values are keys of the JSON report."""

    PADDED = "static_padded"
    STATIC = "static_packed"
    PADDED_CONTINUOUS = "continuous_padded"
    CONTINUOUS = "continuous"


TITLES = {
    Mode.PADDED: "Padded static: transformers' generate, batch by batch",
    Mode.STATIC: "Packed static: no padding, but the next batch waits for the longest request",
    Mode.PADDED_CONTINUOUS: "Padded continuous: batches merged and filtered; others pause while prompts are read",
    Mode.CONTINUOUS: "Continuous: a freed slot takes the next request in the next step",
}


@dataclass(frozen=True, slots=True)
class CompareJob:
    """The work of all runs. prompts: token ids; caps: output tokens of each; slots: concurrent
    requests.

    context: tokens of the longest request that the engine must support (None: the model's context).
    kv_positions: size of the packed runs' KV pool in tokens, rounded up to whole blocks; replaces
    `kv_cache_gib`. attention_backend: backend of the packed runs; "cpu" is torch with transformers'
    modules, as in the padded runs on a CPU.
    """

    prompts: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]
    slots: int
    model: str = "default"
    dtype: str = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    prefix_cache: bool = False
    num_threads: int | None = None
    kv_cache_gib: float = 1.0
    context: int | None = None
    kv_positions: int | None = None
    attention_backend: str = "auto"

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(self.caps)

    def requests(self, prefix: str, max_tokens: int | None = None) -> list[EngineRequest]:
        """Return the job's engine requests, in order. `max_tokens` lowers every output cap (for
        warming up).
        """
        return [
            EngineRequest(
                f"{prefix}-{index}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=min(cap, max_tokens or cap), ignore_eos=True),
            )
            for index, (prompt, cap) in enumerate(zip(self.prompts, self.caps, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run. steps: number of forward passes; seconds: time to generate, without loading and
    warm-up.

    positions: positions computed by the forward passes, including padding. padding: one entry per
    step if padded batches are merged and filtered, else empty.
    """

    mode: Mode
    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int
    positions: int
    timeline: Timeline
    padding: tuple[PaddedStep, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Wanted output tokens per second."""
        return sum(len(output) for output in self.outputs) / self.seconds


Run = Callable[[CompareJob, OnTokens], Measurement]
"""Measures a job. Calls its `OnTokens` argument after each step with the number of new wanted
tokens.
"""


def measure(mode: Mode, job: CompareJob, on_tokens: OnTokens = lambda _: None) -> Measurement:
    """Run the job in one mode, in this process."""
    return open_run(mode, job)(job, on_tokens)


def open_run(mode: Mode, job: CompareJob) -> Run:
    """Load the job's model for one mode. The returned function measures this job and others with
    the same model.
    """
    from serve_app.model.runner import set_num_threads

    if job.num_threads is not None:
        set_num_threads(job.num_threads)
    if mode is Mode.PADDED:
        from serve_app.experiments.padded import PaddedGenerator

        return partial(_measure_padded, PaddedGenerator(job.model, job.dtype, job.device))
    if mode is Mode.PADDED_CONTINUOUS:
        from serve_app.experiments.padded import load_causal_lm

        return partial(_measure_padded_continuous, load_causal_lm(job.model, job.dtype, job.device))
    return partial(_measure_packed, mode, load_packed_model(job))


def _measure_padded(generator: "PaddedGenerator", job: CompareJob, on_tokens: OnTokens) -> Measurement:
    warm_up_caps = [min(cap, _WARM_UP_TOKENS) for cap in job.caps[: job.slots]]
    generator.run(job.prompts[: job.slots], warm_up_caps, job.slots)
    run = generator.run(job.prompts, job.caps, job.slots, on_tokens)
    timeline = Timeline(TITLES[Mode.PADDED], job.slots, run.steps, run.spans)
    return Measurement(Mode.PADDED, run.outputs, run.seconds, run.steps, run.positions, timeline)


def _measure_padded_continuous(model: Any, job: CompareJob, on_tokens: OnTokens) -> Measurement:
    from serve_app.experiments.padded_continuous import PaddedContinuousEngine

    records: list[StepRecord] = []
    padding: list[PaddedStep] = []
    engine = PaddedContinuousEngine(model, job.slots, records.append, padding.append)
    return _measure_steps(Mode.PADDED_CONTINUOUS, engine, job, on_tokens, records, padding)


def _measure_packed(mode: Mode, model: "PagedModel", job: CompareJob, on_tokens: OnTokens) -> Measurement:
    records: list[StepRecord] = []
    return _measure_steps(mode, packed_engine(model, job, records), job, on_tokens, records, [])


def _measure_steps(
    mode: Mode,
    engine: StepEngine,
    job: CompareJob,
    on_tokens: OnTokens,
    records: list[StepRecord],
    padding: list[PaddedStep],
) -> Measurement:
    """Measure an engine that appends to `records` and, if it pads, to `padding`."""
    _generate(engine, job.requests("warm-up", _WARM_UP_TOKENS)[: job.slots], lambda _: None)
    records.clear()
    padding.clear()
    started = time.perf_counter()
    outputs = generate_all(engine, job, on_tokens, batch_size=job.slots if mode is Mode.STATIC else None)
    seconds = time.perf_counter() - started
    positions = sum(record.num_prefill_tokens + record.num_decode_tokens for record in records)
    positions += sum(step.computed - step.wanted for step in padding)
    timeline = timeline_of(TITLES[mode], records, job.slots)
    return Measurement(mode, outputs, seconds, len(records), positions, timeline, tuple(padding))


def load_packed_model(job: CompareJob) -> "PagedModel":
    """Load the job's model for `packed_engine`. Raises `ConfigError`."""
    from serve_app.model.loader import load_model
    from serve_app.model.options import ModelOptions
    from serve_app.model.runner import set_num_threads

    if job.num_threads is not None:
        set_num_threads(job.num_threads)
    return load_model(
        ModelOptions(
            model=job.model,
            dtype=job.dtype,
            device=job.device,
            max_model_len=job.context,
            attention_backend=job.attention_backend,
        )
    )


def packed_engine(model: "PagedModel", job: CompareJob, records: list[StepRecord]) -> "EngineCore":
    """Return our engine with the job's slots and KV pool. It appends its step records to `records`.
    Only one such engine may exist at a time.
    """
    from serve_app.engine.core import EngineConfig, EngineCore

    kv_cache_gib = job.kv_cache_gib
    if job.kv_positions is not None:
        # Besides the scheduler's blocks, the pool has the null block and one for the runner.
        num_blocks = -(-job.kv_positions // model.block_size) + 2
        kv_cache_gib = num_blocks * model.kv_bytes_per_block() / 2**30
    config = EngineConfig(
        max_num_seqs=job.slots,
        max_num_batched_tokens=2048,  # all prompts of a batch in one step, as with padding
        enable_prefix_cache=job.prefix_cache,
        kv_cache_gib=kv_cache_gib,
        speculation="off",  # the comparison is about batching: one token per request and step
    )
    return EngineCore(model, config, on_step=records.append)


def generate_all(
    engine: StepEngine, job: CompareJob, on_tokens: OnTokens, batch_size: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the outputs of all requests. They are submitted at once, or in closed batches: the
    next batch starts when all requests of the previous one have ended.
    """
    requests = job.requests("request")
    size = batch_size or len(requests)
    outputs: list[tuple[int, ...]] = []
    for first in range(0, len(requests), size):
        outputs += _generate(engine, requests[first : first + size], on_tokens)
    return tuple(outputs)


def _generate(engine: StepEngine, requests: Sequence[EngineRequest], on_tokens: OnTokens) -> list[tuple[int, ...]]:
    """Submit the requests together and step until all have finished. Return their output tokens, in
    order.
    """
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        deltas = engine.step()
        if deltas is None:
            raise ServeAppError("the engine has requests but schedules none of them")
        for delta in deltas:
            outputs[delta.request_id].extend(delta.token_ids)
        on_tokens(sum(len(delta.token_ids) for delta in deltas))
    return [tuple(output) for output in outputs.values()]


def measure_in_process(mode: Mode, job: CompareJob, on_tokens: OnTokens) -> Measurement:
    """Run `measure` in a fresh process; see `measure_jobs`."""
    return measure_jobs(mode, [job], on_tokens)[0]


def measure_jobs(mode: Mode, jobs: Sequence[CompareJob], on_tokens: OnTokens) -> list[Measurement]:
    """Run the jobs in one mode, one after another, in a fresh process that inherits no memory,
    threads or warm caches.

    All jobs must use the same model, as described by the first. Raises `ServeAppError` with the
    child's message if it fails.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(mode, jobs, sender), daemon=True)
    child.start()
    sender.close()
    results: list[Measurement] = []
    try:
        while len(results) < len(jobs):
            try:
                message = receiver.recv()
            except EOFError:
                child.join()
                raise ServeAppError(f"{mode} ended without a result (exit status {child.exitcode})") from None
            if isinstance(message, int):
                on_tokens(message)
            elif isinstance(message, Measurement):
                results.append(message)
            else:
                raise ServeAppError(f"{mode}: {message}")
        child.join()
        return results
    finally:
        receiver.close()
        child.terminate()
        child.join()


def _child(mode: Mode, jobs: Sequence[CompareJob], sender: Connection) -> None:
    # Ctrl-C reaches both processes; the parent ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(BrokenPipeError):
        try:
            run = open_run(mode, jobs[0])
            for job in jobs:
                sender.send(run(job, sender.send))
        except BrokenPipeError:
            raise
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    """End this process when the parent ends: a killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
