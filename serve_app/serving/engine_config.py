"""Converts `Settings` to the engine's configuration."""

import os

from serve_app.engine.core import EngineConfig
from serve_app.fleet.attempt import LEAST_STALL_TIMEOUT_S
from serve_app.model.options import KernelOptions, ModelOptions
from serve_app.serving.knobs import scheduler_knobs
from serve_app.settings import Settings

_STALLED_STEPS = 5


def engine_config(
    settings: Settings, *, use_gpu: bool, gpu_share: float = 1.0, end_ids: tuple[int, ...] = ()
) -> EngineConfig:
    """Return the engine's configuration.

    `use_gpu`: whether Ray has assigned the replica a GPU or a share of one. `end_ids`: the
    tokenizer's end tokens.
    """
    engine = settings.engine
    threads = engine.num_threads
    if threads is None and not use_gpu:
        threads = max(1, (os.cpu_count() or 1) // settings.max_replicas)
    return EngineConfig(
        model=ModelOptions(
            model=settings.model,
            dtype=settings.dtype,
            device="cuda" if use_gpu else "cpu",
            max_model_len=engine.max_model_len if isinstance(engine.max_model_len, int) else None,
            quantization=settings.quantization,
            ignore_model_keys=tuple(settings.ignore_model_keys),
            kernel_options=KernelOptions(deterministic=engine.deterministic, fp8_cache=engine.kv_cache_dtype == "fp8"),
            end_ids=end_ids,
        ),
        **scheduler_knobs(settings).knobs(),
        auto_slots=engine.max_num_seqs == "auto",
        auto_context=engine.max_model_len == "auto",
        auto_step_tokens=engine.max_num_batched_tokens == "auto",
        kv_cache_gib=engine.kv_cache_gib,
        memory_fraction=engine.memory_fraction,
        gpu_share=gpu_share,
        # The ingress enforces the limit. The engine's own limit is higher, because a request that
        # has left the ingress stays in the engine until the step in flight ends.
        max_num_waiting=settings.max_num_waiting + settings.max_ongoing_per_replica,
        num_threads=threads,
    )


def stall_timeout_s(settings: Settings, largest_step_s: float) -> float:
    """Return the limit for a step in seconds.

    As configured, or a multiple of the largest step at start: later steps can take longer, because
    they read the keys of long contexts and the machine may be busier.
    """
    given = settings.engine.stall_timeout_s
    return max(LEAST_STALL_TIMEOUT_S, _STALLED_STEPS * largest_step_s) if given is None else given
