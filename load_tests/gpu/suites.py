"""The two sequences of stages, the most important first: the engine alone, and the server through
Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Suite:
    """Stages by name: a function of `module` and, after a space, its arguments."""

    module: str
    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    stage_limit_s: float = 480.0
    cpu_environment: Mapping[str, str] = field(default_factory=dict)

    def stages(self, device: str) -> tuple[str, ...]:
        """Return the stages for this device, `cuda` or `cpu`."""
        return self.cpu if device == "cpu" else self.gpu


ENGINE = Suite(
    module="load_tests.gpu.engine_stages",
    gpu=(
        "smoke",
        "kernels",
        "features tiny",
        "parity tiny",
        "parity tiny-gemma3",
        "parity tiny-qwen3-moe",
        "parity qwen3-0.6b",
        "graphs tiny",
        "graphs qwen3-0.6b",
        "steps llama-3.1-8b",
        "steps qwen3-0.6b",
        "attention",
        "fit qwen3-32b",
        "transformers qwen3-0.6b",
        "transformers llama-3.1-8b",
        "vllm qwen3-0.6b",
        "vllm llama-3.1-8b",
        "steps qwen3-4b",
        "steps llama-3.2-1b",
        "parity llama-3.2-1b",
        "overlap qwen3-0.6b",
        "overlap llama-3.1-8b",
        "prices llama-3.1-8b",
        "host",
        "sanitizer",
    ),
    cpu=(
        "smoke",
        "kernels",
        "features tiny",
        "parity tiny",
        "parity tiny-gemma3",
        "parity tiny-qwen3-moe",
        "graphs tiny",
        "steps tiny",
        "attention",
        "fit tiny",
        "transformers tiny",
        "vllm tiny",
        "overlap tiny",
        "prices tiny",
        "host",
        "sanitizer",
    ),
    cpu_environment={"TRITON_INTERPRET": "1"},
)
SERVE = Suite(
    module="load_tests.gpu.serve_stages",
    gpu=(
        "machine",
        "start",
        "big llama-3.1-8b",
        "tokens",
        "chaos",
        "autoscale",
        "load",
        "big qwen3-0.6b",
        "vllm llama-3.1-8b",
        "vllm qwen3-0.6b",
    ),
    cpu=("machine", "start", "big tiny", "tokens", "chaos", "autoscale", "load", "vllm tiny"),
)
SUITES: Mapping[str, Suite] = {"engine": ENGINE, "serve": SERVE}
