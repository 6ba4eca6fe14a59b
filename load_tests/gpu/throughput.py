"""Tokens per second of whole engines on the same prompts: ours, transformers' and vLLM's.

Also compares our captured and eager steps token by token.
"""

import importlib
import tempfile
import time
from random import Random
from typing import Any, Literal

from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from load_tests.gpu.steps import Machine, paged, random_module
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.options import KernelOptions

_DETERMINISTIC = KernelOptions(deterministic=True)
SLOTS = 256
"""Number of concurrent requests."""


def ours(
    config: dict[str, Any],
    machine: Machine,
    prompts: list[list[int]],
    output: int,
    overlap: Literal["auto", "on", "off"] = "auto",
) -> tuple[float, dict[str, Any]]:
    """Return the engine's tokens per second, and the time of each part of its steps.

    An earlier run warms up every batch size.
    """
    module = random_module(config, machine.device, machine.dtype)
    records: list[StepRecord] = []
    gpu = machine.device.type == "cuda"
    settings = EngineConfig(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=8192 if gpu else SLOTS,
        kv_cache_gib=None if gpu else 0.05,
        speculation="off",
        overlap=overlap,
    )
    begin = time.perf_counter()
    core = EngineCore(paged(module), settings, on_step=records.append)
    start_s = time.perf_counter() - begin
    del module
    slots = min(SLOTS, len(prompts))
    _run(core, [prompts[0][:8]] * slots, [1 + index * 40 // slots for index in range(slots)], "warm")
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
        # What the steps had at least to do, over the time that the device needs for it at its
        # measured best.
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
    _expect(count, sum(outputs))
    return count


def transformers_rate(
    config: dict[str, Any],
    machine: Machine,
    prompts: list[list[int]],
    output: int,
    cuda_graphs: bool | None = None,
) -> float:
    """Return the tokens per second of transformers' continuous batching.

    cuda_graphs: None is its own choice, which with `sdpa` and its masks means no graphs and no
    asynchronous batching. Startup (cache, graphs) is not counted: an earlier run of the same
    manager has done it.
    """
    module = random_module(config, machine.device, machine.dtype, attn_implementation="sdpa")
    # By default the cache takes most of the memory, which a CPU would have to zero.
    size = {} if machine.device.type == "cuda" else {"num_blocks": 16, "max_batch_tokens": 64}
    batching = ContinuousBatchingConfig(use_cuda_graph=cuda_graphs, **size)
    settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(inputs: list[list[int]]) -> float:
        begin = time.perf_counter()
        results = module.generate_batch(
            inputs=inputs,
            generation_config=settings,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        took_s = time.perf_counter() - begin
        _expect(sum(len(result.generated_tokens) for result in results.values()), output * len(inputs))
        return took_s

    try:
        run(prompts[: min(len(prompts), SLOTS)])
        return output * len(prompts) / run(prompts)
    finally:
        module.destroy_cached_continuous_batching_manager()


def vllm_rate(config: dict[str, Any], machine: Machine, prompts: list[list[int]], output: int) -> float:
    """Return the tokens per second of vLLM's offline engine with its defaults and random
    weights."""
    vllm: Any = importlib.import_module("vllm")

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**config, architectures=[architecture]).save_pretrained(folder)
        engine = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(machine.dtype).removeprefix("torch."),
            max_num_seqs=SLOTS,
            max_model_len=2 * (len(prompts[0]) + output),
            enable_prefix_caching=False,
        )
    settings = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)

    def run(inputs: list[list[int]]) -> float:
        begin = time.perf_counter()
        results = engine.generate([{"prompt_token_ids": ids} for ids in inputs], settings, use_tqdm=False)
        took_s = time.perf_counter() - begin
        _expect(sum(len(result.outputs[0].token_ids) for result in results), output * len(inputs))
        return took_s

    run(prompts[: min(len(prompts), SLOTS)])
    return output * len(prompts) / run(prompts)


def same_tokens(config: dict[str, Any], machine: Machine, *, requests: int, longest: int) -> dict[str, Any]:
    """Compare tokens of captured, overlapped steps with those of eager steps, one after another.

    Sampled and greedy requests, prompts in chunks, batches that grow and shrink. Rows are
    deterministic, so padding must not change them.
    """
    random = Random(0)
    work = [
        EngineRequest(
            str(index),
            tuple(random.choices(range(2, config["vocab_size"]), k=random.randint(1, longest))),
            SamplingParams(
                temperature=random.choice((0.0, 0.8)), top_p=0.9, seed=index, max_tokens=3 + index % 13, ignore_eos=True
            ),
        )
        for index in range(requests)
    ]

    # On a CPU, which captures nothing, Triton's interpreter computes in the graphs' buffers.
    module = random_module(config, machine.device, machine.dtype)
    model = paged(module, max_model_len=128, kernel_options=_DETERMINISTIC, attention_backend="triton")

    def tokens(*, eager: bool) -> dict[str, list[int]]:
        settings = EngineConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            kv_cache_gib=1.0 if machine.device.type == "cuda" else 0.05,
            overlap="off" if eager else "on",
        )
        core = EngineCore(model, settings)
        graphs = ("_decode", "_mixed")
        if eager:
            for name in graphs:
                setattr(model.executor, name, None)
        elif missing := [name for name in graphs if getattr(model.executor, name, None) is None]:
            raise RuntimeError(f"not captured: {', '.join(missing)}")
        for request in work:
            core.add(request)
        found: dict[str, list[int]] = {request.request_id: [] for request in work}
        while core.has_unfinished:
            for delta in core.step() or ():
                found[delta.request_id] += delta.token_ids
        return found

    captured, eager = tokens(eager=False), tokens(eager=True)
    equal = sum(captured[name] == eager[name] for name in eager)
    return {"passed": equal == len(work), "equal": equal, "of": len(work)}


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise RuntimeError(f"{count} tokens came of {wanted}")
