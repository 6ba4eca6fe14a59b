"""Runs Ray Serve LLM with its vLLM engine on the CPU: `ray_llm_app.py MODEL_FOLDER PORT
ENGINE_JSON`.

Runs in its own environment (`peer_setup`), so it imports no module of ours. SIGTERM ends it.
"""

import json
import os
import signal
import sys
import tempfile
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

# Ray counts cores where it places actors. Router, replica and engine worker would not fit on two,
# and none holds one.
_PLACES = 8
_FORWARDED = (
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CACHE_ROOT"),
    *("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"),
)


def main(model: str, port: int, engine: dict[str, Any]) -> None:
    """Serve until a signal arrives. `engine`: arguments of vLLM's engine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Sockets' paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-llm-", dir="/tmp") as scratch:
        ray.init(
            address="local",
            num_cpus=_PLACES,
            include_dashboard=False,
            object_store_memory=400 * 2**20,
            _temp_dir=scratch,
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ray.init takes it for itself
        config = LLMConfig(
            model_loading_config={"model_id": "default", "model_source": model},
            accelerator_config={"kind": "cpu"},
            deployment_config={
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 1},
                "max_ongoing_requests": 256,
            },
            engine_kwargs=engine | {"distributed_executor_backend": "mp"},
            runtime_env={"env_vars": {name: os.environ[name] for name in _FORWARDED if name in os.environ}},
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
