"""The engine's stages, without a server: `python -m load_tests.gpu.engine_stages STAGE [SHAPE]
--device cuda`.

Needs torch, triton, transformers and numpy; no Ray, no weights (models have random ones, of the
shapes in `shapes/`). Every limit (copy bandwidth, rate of large products) is measured in the same
process as what is compared with it. A decode step is judged by its time when steps are queued, as
the engine queues them; its time when each step is awaited is among the figures.

On a CPU the sizes are tiny and only results are judged: that shows that the stage runs.
"""

import argparse
import gc
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from load_tests.gpu.checks import Checks, Result, skipped

SHAPES = Path(__file__).parents[1] / "shapes"
DECODE_LIMITS = {"llama-3.1-8b": {1: 1.5, 32: 1.35}, "qwen3-0.6b": {32: 1.9}}
"""Limits of the queued step's time divided by the floor (bytes / copy bandwidth), by shape and
rows."""
PREFILL_LIMITS = {"llama-3.1-8b": 0.65}
"""Minimum share of the measured rate of large products."""
ATTENTION_LIMIT = 0.85
"""Minimum share of the measured copy bandwidth."""
FIT_LAYERS = 4
"""Layers of a large model: its widest matrices decide how much loading needs."""
THROUGHPUT_LIMIT = 5.0
HOST_LIMIT_MS = 2.0


class Bench(Checks):
    """The device and its checks. gpu: whether limits apply."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.gpu = device == "cuda"

    @cached_property
    def machine(self) -> Any:
        """The device's limits, measured at the first call."""
        from load_tests.gpu.steps import Machine

        return Machine.measured(self.device)

    def lives(self) -> bool:
        """Whether the device works. After an illegal access every call of the process fails."""
        try:
            torch.ones(1, device=self.device).item()
        except RuntimeError:
            return False
        return True

    @contextmanager
    def loaded(self, shape: str, **options: Any) -> Iterator[Callable[[], Any]]:
        """Yield a function that loads the model at its first call, inside a check.

        Free it at the end.
        """
        from load_tests.gpu.steps import Loaded

        held: list[Any] = []

        def load() -> Any:
            if not held:
                held.append(Loaded.random(config_of(shape), self.machine, **options))
            return held[0]

        try:
            yield load
        finally:
            held.clear()
            free()


def smoke(bench: Bench) -> None:
    """Check versions, the device's limits, and a tiny engine's tokens against transformers'."""
    from load_tests.gpu.steps import parity

    def circumstances() -> Result:
        import transformers

        machine = bench.machine
        return {
            "passed": True,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "device": torch.cuda.get_device_name() if bench.gpu else platform.machine(),
            "dtype": str(machine.dtype),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": __import__("triton").__version__ if importlib.util.find_spec("triton") else None,
            "transformers": transformers.__version__,
            "copy_bandwidth_gb_per_s": machine.copy_bandwidth / 1e9,
            "matmul_tflop_per_s": machine.matmul_rate / 1e12,
        }

    bench.check("circumstances", "measured", circumstances)
    bench.check("tiny engine, float32", "the same greedy tokens", lambda: parity(config_of("tiny"), bench.device))


def kernels(bench: Bench) -> None:
    """Check every kernel against torch on this device."""
    from load_tests.gpu import kernels

    dtypes = (torch.float32, torch.bfloat16) if bench.gpu else (torch.float32,)
    for name, compare in kernels.comparisons(full=bench.gpu).items():
        for dtype in dtypes:
            bench.check(f"{name}, {str(dtype)[6:]}", "agrees", partial(compare, bench.device, dtype))


def features(bench: Bench, shape: str) -> None:
    """Check every request parameter against the CPU."""
    from load_tests.gpu import features

    bench.check(f"{shape}, all parameters", "as on the CPU", lambda: features.features(config_of(shape), bench.device))


def parity(bench: Bench, shape: str) -> None:
    """Check the engine's tokens in float32, and its logits in the device's dtype, against
    transformers'."""
    from load_tests.gpu import steps

    config = config_of(shape)
    bench.check(f"{shape} tokens, float32", "the same greedy tokens", lambda: steps.parity(config, bench.device))
    bench.check(
        f"{shape} logits, {str(bench.machine.dtype)[6:]}",
        "as near to transformers' as the reference backend must be",
        lambda: steps.logits_parity(config, bench.machine),
    )


def graphs(bench: Bench, shape: str) -> None:
    """Check tokens of captured and overlapped steps against eager steps, one after another.

    With deterministic rows, so that padding must not change them.
    """
    from load_tests.gpu.throughput import same_tokens

    config, requests, longest = config_of(shape), *((24, 90) if bench.gpu else (2, 9))
    bench.check(
        f"{shape}, graphs and overlap",
        "the tokens of eager steps",
        lambda: same_tokens(config, bench.machine, requests=requests, longest=longest),
    )


def steps(bench: Bench, shape: str) -> None:
    """Check decode and prefill on one loaded model against the device's limits."""
    from load_tests.gpu.steps import decode_step, prefill

    context, counts = (1024, (1, 8, 32, 128, 256)) if bench.gpu else (40, (1, 3))
    prompts, length = (8, 2048) if bench.gpu else (2, 20)
    with bench.loaded(shape) as load:

        def decode(rows: int, limit: float | None) -> Result:
            return decode_step(load(), bench.machine, rows, context, limit)

        for rows in reversed(counts):
            limit = DECODE_LIMITS.get(shape, {}).get(rows)
            text = "measured" if limit is None else f"queued step <= {limit} x the bytes' floor"
            bench.check(f"{shape} decode, batch {rows}, context {context}", text, partial(decode, rows, limit))
        share = PREFILL_LIMITS.get(shape)
        bench.check(
            f"{shape} prefill, {prompts} x {length} tokens",
            "measured" if share is None else f">= {share} of the rate of large products",
            lambda: prefill(load(), bench.machine, prompts, length, share),
        )


def fit(bench: Bench, shape: str) -> None:
    """Memory at the peak of loading from files against the memory that is kept, with few layers."""
    from load_tests.gpu.memory import PEAK_LIMIT, fit

    config = {**config_of(shape), "num_hidden_layers": FIT_LAYERS}
    for quantization in ("none", "fp8"):
        bench.check(
            f"{shape} with {FIT_LAYERS} layers, {quantization}",
            f"peak at load <= {PEAK_LIMIT} x kept",
            partial(fit, config, bench.device, bench.machine.dtype, quantization),
        )


def attention(bench: Bench) -> None:
    """Check the attention kernel alone, in decode."""
    from load_tests.gpu.steps import attention_bandwidth

    rows, context, limit = (32, 4096, ATTENTION_LIMIT) if bench.gpu else (2, 70, 0.0)
    for shape in ((32, 8, 128), (16, 8, 128), (32, 8, 64)) if bench.gpu else ((4, 2, 32),):
        bench.check(
            f"attention {shape[0]}/{shape[1]}x{shape[2]}, batch {rows}, context {context}",
            f">= {limit} of copy bandwidth",
            partial(attention_bandwidth, bench.machine, shape, rows=rows, context=context, limit=limit),
        )


def transformers(bench: Bench, shape: str) -> None:
    """Compare a full engine with transformers' continuous batching, with its CUDA graphs and by
    default."""
    from load_tests.gpu.throughput import transformers_rate

    _against(
        bench,
        shape,
        {
            "transformers with CUDA graphs": partial(transformers_rate, cuda_graphs=True),
            "transformers as it is": transformers_rate,
        },
        THROUGHPUT_LIMIT if bench.gpu else None,
    )


def vllm(bench: Bench, shape: str) -> None:
    """Compare a full engine with vLLM, if it is installed."""
    if importlib.util.find_spec("vllm") is None:
        bench.check(f"{shape} throughput, vllm", "measured", partial(skipped, "vllm is not installed"))
        return
    from load_tests.gpu.throughput import vllm_rate

    _against(bench, shape, {"vllm": vllm_rate}, None)


def _against(bench: Bench, shape: str, peers: dict[str, Callable[..., float]], limit: float | None) -> None:
    """Compare output tokens per second, each engine alone on the GPU.

    The limit applies to the first peer.
    """
    from load_tests.gpu.throughput import ours

    config = config_of(shape)
    requests, prompt, output = _load(bench)
    prompts = _prompts(config, requests, prompt)
    our_rate = 0.0

    def engine() -> Result:
        nonlocal our_rate
        our_rate, details = ours(config, bench.machine, prompts, output)
        return {"passed": True, "tokens_per_s": our_rate, **details}

    size = f"{prompt} in {output} out"
    bench.check(f"{shape} throughput, {size}", "measured", engine)
    for index, (name, rate_of) in enumerate(peers.items()):
        free()
        least = limit if index == 0 else None

        def peer(rate_of: Callable[..., float] = rate_of, least: float | None = least) -> Result:
            rate = rate_of(config, bench.machine, prompts[: max(2, requests // 2)], output)
            return {"passed": least is None or our_rate >= least * rate, "ratio": our_rate / rate, "tokens_per_s": rate}

        text = "measured" if least is None else f"ours >= {least} x"
        bench.check(f"{shape} throughput, {size}: {name}", text, peer)


def overlap(bench: Bench, shape: str) -> None:
    """Compare output tokens per second with and without overlap of steps."""
    from load_tests.gpu.throughput import ours

    config = config_of(shape)
    requests, prompt, output = _load(bench)

    def rate(mode: Literal["off", "on"]) -> float:
        rate, _ = ours(config, bench.machine, _prompts(config, requests // 2, prompt), output, mode)
        free()
        return rate

    def compared() -> Result:
        off, on = rate("off"), rate("on")
        return {"passed": True, "ratio": on / off, "off_tokens_per_s": off, "on_tokens_per_s": on}

    bench.check(f"{shape} overlap, {prompt} in {output} out", "measured", compared)


def prices(bench: Bench, shape: str) -> None:
    """Measure costs and gains of other modes, relative to the plain one."""
    from load_tests.gpu.steps import decode_step, prefill
    from serve_app.model.options import KernelOptions

    context, counts = (1024, (1, 32)) if bench.gpu else (40, (2,))
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "deterministic": {"form": KernelOptions(deterministic=True)},
    }
    if bench.gpu:
        variants["fp8 weights"] = {"quantization": "fp8"}
        variants["fp8 KV"] = {"form": KernelOptions(fp8_cache=True)}
    for name, options in variants.items():
        with bench.loaded(shape, **options) as load:

            def decode(rows: int, load: Callable[[], Any] = load, **sampling: Any) -> Result:
                return decode_step(load(), bench.machine, rows, context, None, **sampling)

            for rows in counts:
                bench.check(f"{shape} {name}, decode, batch {rows}", "measured", partial(decode, rows))
            if not options:
                drawn = partial(decode, counts[-1], temperature=0.7, top_k=20, top_p=0.8)
                bench.check(f"{shape} top-k and top-p, decode, batch {counts[-1]}", "measured", drawn)
            bench.check(
                f"{shape} {name}, prefill, 2 x {context}",
                "measured",
                lambda load=load: prefill(load(), bench.machine, 2, context, None),  # type: ignore[misc]
            )


def host(bench: Bench) -> None:
    """Measure the parts of a step on the host, for which the GPU must not wait."""
    from load_tests.gpu.host import measure

    rows, context, count = (256, 4096, 100) if bench.gpu else (4, 40, 4)

    def parts() -> Result:
        found = {f"{name}_ms": 1e3 * statistics.median(times) for name, times in measure(rows, context, count).items()}
        ratio = found["all_ms"] / HOST_LIMIT_MS
        return {"passed": not bench.gpu or ratio <= 1, "ratio": ratio, **found}

    bench.check(f"host's part of a step, {rows} rows, context {context}", f"<= {HOST_LIMIT_MS} ms", parts)


def sanitizer(bench: Bench) -> None:
    """Run the smoke stage under compute-sanitizer.

    It detects accesses outside of torch's segments of device memory, but not all accesses outside
    of a tensor.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None or not bench.gpu:
        reason = "there is no GPU" if tool is not None else "compute-sanitizer is not installed"
        bench.check("compute-sanitizer", "finds nothing", partial(skipped, reason))
        return

    def sanitized() -> Result:
        command = [tool, "--error-exitcode", "9", sys.executable, "-m", "load_tests.gpu.engine_stages", "smoke"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=450)
        return {"passed": done.returncode == 0, "exit_status": done.returncode, "output": done.stdout[-1000:]}

    bench.check("compute-sanitizer", "finds nothing", sanitized)


def _load(bench: Bench) -> tuple[int, int, int]:
    """Return number of requests, prompt length and output length in tokens."""
    return (512, 512, 128) if bench.gpu else (4, 12, 3)


def _prompts(config: dict[str, Any], requests: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, config["vocab_size"], (length,), generator=generator).tolist() for _ in range(requests)]


def config_of(shape: str) -> dict[str, Any]:
    """Return the configuration of a shape in `shapes/`."""
    config: dict[str, Any] = json.loads((SHAPES / f"{shape}.json").read_text())
    return config


def free() -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


STAGES: dict[str, Callable[..., None]] = {
    stage.__name__: stage
    for stage in (
        *(smoke, kernels, features, parity, graphs, steps, attention, fit),
        *(transformers, vllm, overlap, prices, host, sanitizer),
    )
}


def main() -> int:
    """Run the stage of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("shape", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    bench = Bench(arguments.device)
    STAGES[arguments.stage](bench, *arguments.shape)
    return int(not bench.all_passed)


if __name__ == "__main__":
    raise SystemExit(main())
