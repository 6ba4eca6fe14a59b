"""Recorded steps of the real scheduler over a model that costs nothing, on a clock that ticks 10 ms
a step."""

from collections.abc import Sequence
from typing import Any

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_record import StepRecord
from serve_app.observability.step_ring import Recording
from tests.core.fake_model import FakeRunner

SCHEDULE_S, MODEL_S, UPDATE_S = 0.001, 0.008, 0.001
STEP_S = SCHEDULE_S + MODEL_S + UPDATE_S


def record_run(prompts: Sequence[int], caps: Sequence[int], names: Sequence[str] = (), **knobs: Any) -> Recording:
    """All requests at once: prompts of these many tokens, outputs of these many."""
    options = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "vocab_size": 50, "max_num_seqs": 2}
    options |= {"speculation": "off", **knobs}
    config = SchedulerConfig(**options)
    scheduler, runner = Scheduler(config), FakeRunner(config)
    for index, (prompt, cap) in enumerate(zip(prompts, caps, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True)
        name = names[index] if names else f"r{index}"
        scheduler.add(EngineRequest(name, tuple(range(2, 2 + prompt)), params), 0.0)
    records: list[StepRecord] = []
    while scheduler.has_unfinished:
        now = 100.0 + len(records) * STEP_S
        output = scheduler.schedule(now)
        if not output.rows:
            break
        deltas = scheduler.update(output, runner.execute(output))
        prefill = sum(row.num_tokens for row in output.rows if row.is_prefill)
        records.append(
            StepRecord(
                step=output.step,
                started_at=now,
                schedule_s=SCHEDULE_S,
                model_s=MODEL_S,
                update_s=UPDATE_S,
                rows=output.rows,
                num_prefill_tokens=prefill,
                num_decode_tokens=output.num_tokens - prefill,
                num_output_tokens=sum(len(delta.token_ids) for delta in deltas),
                prefix_hit_tokens=output.prefix_hit_tokens,
                prefix_queried_tokens=output.prefix_queried_tokens,
                preempted=output.preempted,
                admitted=output.admitted,
                finished=tuple((d.request_id, d.choice, d.finish_reason) for d in deltas if d.finish_reason),
                gate_open=output.gate_open,
                stats=scheduler.stats(),
            )
        )
    stats = scheduler.stats()
    return Recording("alpha", 200.0, config.max_num_seqs, config.block_size, stats, None, tuple(records))
