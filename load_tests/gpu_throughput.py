"""A saturated engine, ours and transformers' continuous batching, on the same prompts: output tokens per second."""

import inspect
import time
from typing import Any, Literal

from transformers import GenerationConfig

from load_tests.gpu_steps import Machine, paged, random_module
from serve_app.core.output import StepRecord
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore

SEATS = 256
"""Requests at once."""


def ours(
    config: dict[str, Any],
    machine: Machine,
    prompts: list[list[int]],
    output: int,
    overlap: Literal["auto", "on", "off"] = "auto",
) -> tuple[float, dict[str, Any]]:
    """Tokens per second of the engine, and where its steps' time went. A run before warms up every batch size."""
    module = random_module(config, machine.device, machine.dtype)
    records: list[StepRecord] = []
    settings = EngineConfig(max_num_seqs=SEATS, max_num_batched_tokens=8192, speculation="off", overlap=overlap)
    begin = time.perf_counter()
    core = EngineCore(paged(module), settings, on_step=records.append)
    start_s = time.perf_counter() - begin
    del module
    seats = min(SEATS, len(prompts))
    _run(core, [prompts[0][:8]] * seats, [1 + index * 40 // seats for index in range(seats)], "warm")
    records.clear()
    begin = time.perf_counter()
    count = _run(core, prompts, [output] * len(prompts), "run")
    took_s = time.perf_counter() - begin
    decode = [record for record in records if not record.num_prefill_tokens]
    prefill = [record for record in records if record.num_prefill_tokens]
    decode_s, prefill_s = (sum(record.model_s for record in part) for part in (decode, prefill))
    host_s = [record.schedule_s + record.update_s for record in records]
    return count / took_s, {
        "start_s": start_s,
        "took_s": took_s,
        "steps": len(records),
        "decode_steps": len(decode),
        "schedule_and_update_ms_per_step": 1e3 * sum(host_s) / len(records),
        "model_ms_per_decode_step": 1e3 * decode_s / max(len(decode), 1),
        "model_s_in_steps_with_prefill": prefill_s,
        # What the steps had at least to do, over the time that the device needs for it at its measured best.
        "decode_share_of_copy_bandwidth": sum(r.num_bytes for r in decode)
        / max(decode_s, 1e-9)
        / machine.copy_bandwidth,
        "prefill_share_of_matmul_rate": sum(r.num_flops for r in prefill) / max(prefill_s, 1e-9) / machine.matmul_rate,
    }


def _run(core: EngineCore, prompts: list[list[int]], outputs: list[int], name: str) -> int:
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        core.add(EngineRequest(f"{name}-{index}", tuple(prompt), params))
    count = 0
    while core.has_unfinished:
        count += sum(len(delta.token_ids) for delta in core.step() or ())
    if count != sum(outputs):
        raise RuntimeError(f"{count} tokens came of {sum(outputs)}")
    return count


def theirs(config: dict[str, Any], machine: Machine, prompts: list[list[int]], output: int) -> tuple[float, bool]:
    """Tokens per second of transformers' continuous batching with `sdpa` and what else it chooses itself; whether its
    start (cache, CUDA graphs) is in that time, because its release cannot keep a manager from run to run."""
    module = random_module(config, machine.device, machine.dtype, attn_implementation="sdpa")
    keeps = "persistent_manager" in inspect.signature(module.generate_batch).parameters
    options = {"persistent_manager": True} if keeps else {}

    def run(inputs: list[list[int]]) -> float:
        settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        results = module.generate_batch(inputs=inputs, generation_config=settings, **options)
        took_s = time.perf_counter() - begin
        count = sum(len(result.generated_tokens) for result in results.values())
        if count != output * len(inputs):
            raise RuntimeError(f"{count} tokens came of {output * len(inputs)}")
        return took_s

    run(prompts[: min(len(prompts), SEATS)])
    return output * len(prompts) / run(prompts), not keeps
