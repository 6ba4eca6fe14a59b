"""The engine on one GPU against what the GPU can do, in one run: parity, decode, prefill, attention, throughput.

`python -m load_tests.gpu_engine --json FILE` needs torch, triton, transformers and numpy; no server, no Ray, and no
weights: models have random ones, of the shapes in `shapes/`. Every limit (copy bandwidth, rate of large products) is
measured in the same run as what is compared with it. A check that fails or breaks does not stop the others; the exit
status is 1 when one does. On a CPU it runs the tiny shape, to show that it runs.

Where compute-sanitizer is installed, a tiny engine runs under it. It finds accesses outside of the segments that torch
takes from the device, not all of those outside of a tensor. What has a limit comes first, prices and gains without one
last; what has not begun after `--minutes` is left out, and so not passed.
"""

import argparse
import gc
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from load_tests.gpu_steps import Loaded, Machine, attention_bandwidth, decode_step, logits_parity, parity, prefill
from load_tests.gpu_throughput import ours, theirs
from serve_app.model.paged_model import GpuForm

SHAPES = Path(__file__).parent / "shapes"


def main() -> int:
    """Run the checks, print a line for each, write them as JSON."""
    arguments = _arguments()
    machine = Machine.measured(torch.device(arguments.device))
    report: dict[str, Any] = {"circumstances": _circumstances(machine), "checks": []}
    deadline = time.perf_counter() + 60 * arguments.minutes

    def check(name: str, limit: str, run: Callable[[], dict[str, Any]]) -> None:
        if arguments.only and not any(word in name for word in arguments.only.split(",")):
            return
        begin = time.perf_counter()
        try:
            if begin > deadline:
                raise TimeoutError(f"left out after {arguments.minutes:g} minutes")
            result = {"name": name, "limit": limit, **run()}
        except Exception as error:  # a check must not take the others with it
            result = {"name": name, "limit": limit, "passed": False, "error": f"{type(error).__name__}: {error}"}
        result["took_s"] = round(time.perf_counter() - begin, 1)
        report["checks"].append(result)
        print(json.dumps(result), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")

    print(json.dumps(report["circumstances"]), flush=True)
    if machine.device.type == "cuda":
        _gpu_checks(check, machine)
    else:
        _checks_of(check, machine, "tiny", decode_limits={1: None, 4: None}, context=64, prompts=(2, 48))
        _variants(check, machine, "tiny", rows=(4,), context=64)
        check("tiny overlap", "runs", lambda: _overlap("tiny", machine, requests=4, prompt=20, output=4))
        check("tiny throughput", "runs", lambda: _throughput("tiny", machine, requests=4, prompt=20, output=4))
    return int(not all(result["passed"] for result in report["checks"]))


Check = Callable[[str, str, Callable[[], dict[str, Any]]], None]


def _gpu_checks(check: Check, machine: Machine) -> None:
    check("tiny parity, float32", "the same greedy tokens", lambda: parity(_config("tiny"), machine.device))
    check("compute-sanitizer", "finds nothing in a tiny engine's steps", _sanitized)
    check("host's part of a step, 256 rows, context 4096", "<= 1 ms", lambda: _host_work(256, 4096, limit_ms=1.0))
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (32, 8, 64)):
        check(
            f"attention kernel {heads}/{kv_heads}x{dim}, batch 32, context 4096",
            ">= 0.85 of copy bandwidth",
            partial(attention_bandwidth, machine, (heads, kv_heads, dim), rows=32, context=4096, limit=0.85),
        )
    limits: dict[str, dict[int, float | None]] = {
        "qwen3-0.6b": {1: None, 8: 1.8, 32: 1.8},
        "llama-3.2-1b": {1: None, 8: None, 32: None},
        "qwen3-4b": {1: 1.35, 8: 1.35, 32: 1.35},
        "llama-3.1-8b": {1: 1.35, 8: 1.35, 32: 1.35},
    }
    for shape, decode_limits in limits.items():
        _checks_of(check, machine, shape, decode_limits=decode_limits, context=1024, prompts=(8, 2048))
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        check(
            f"{shape} throughput, 512 in 128 out, 256 at once",
            ">= 5 x transformers' continuous batching",
            partial(_throughput, shape, machine, requests=512, prompt=512, output=128, limit=5.0),
        )
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        check(
            f"{shape} overlap, 512 in 128 out, 256 at once",
            "measured",
            partial(_overlap, shape, machine, requests=256, prompt=512, output=128),
        )
    _variants(check, machine, "llama-3.1-8b", rows=(1, 32), context=1024)


def _checks_of(
    check: Check,
    machine: Machine,
    shape: str,
    *,
    decode_limits: dict[int, float | None],
    context: int,
    prompts: tuple[int, int],
) -> None:
    """Parity for the small shapes, then decode and prefill in the machine's dtype on one loaded model."""
    if shape in ("tiny", "qwen3-0.6b", "llama-3.2-1b"):
        check(f"{shape} parity, float32", "the same greedy tokens", lambda: parity(_config(shape), machine.device))
        check(
            f"{shape} parity, logits",
            "as near to transformers' as the reference backend must be",
            lambda: logits_parity(_config(shape), machine),
        )
    with _loaded(shape, machine) as loaded:

        def decode(rows: int, limit: float | None) -> dict[str, Any]:
            return decode_step(loaded(), machine, rows, context, limit)

        for rows, limit in decode_limits.items():
            check(
                f"{shape} decode, batch {rows}, context {context}",
                "measured" if limit is None else f"<= {limit} x the bytes' floor",
                partial(decode, rows, limit),
            )
        limit = 0.6 if shape == "llama-3.1-8b" else None
        check(
            f"{shape} prefill, {prompts[0]} x {prompts[1]} tokens",
            "measured" if limit is None else f">= {limit} of the rate of large products",
            lambda: prefill(loaded(), machine, *prompts, limit),
        )


def _sanitized() -> dict[str, Any]:
    """The tiny parity check in a process of its own under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"passed": True, "skipped": "compute-sanitizer is not installed"}
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "load_tests.gpu_engine", "--only", "tiny parity"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return {"passed": done.returncode == 0, "exit_status": done.returncode, "output_tail": done.stdout[-1000:]}


def _host_work(rows: int, context: int, *, limit_ms: float) -> dict[str, Any]:
    """Medians of the parts of a step that need no GPU, in milliseconds."""
    from load_tests.gpu_host import measure

    parts = {name: 1e3 * statistics.median(times) for name, times in measure(rows, context, 100).items()}
    return {"passed": parts["all"] <= limit_ms, "ratio": parts["all"] / limit_ms, "ms": parts}


def _variants(check: Check, machine: Machine, shape: str, *, rows: tuple[int, ...], context: int) -> None:
    """The prices and gains of other ways to compute a decode step; the plain one is measured beside each."""
    gpu = machine.device.type == "cuda"
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "deterministic": {"form": GpuForm(deterministic=True)},
        **({"fp8 weights": {"quantization": "fp8"}, "fp8 KV": {"form": GpuForm(fp8_cache=True)}} if gpu else {}),
    }
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    for name, options in variants.items():
        with _loaded(shape, machine, **options) as loaded:

            def decode(count: int) -> dict[str, Any]:
                return decode_step(loaded(), machine, count, context, None)

            for count in rows:
                check(
                    f"{shape} {name}, decode, batch {count}, context {context}",
                    "measured",
                    partial(decode, count),
                )
            check(
                f"{shape} {name}, prefill, 2 x {context}",
                "measured",
                lambda: prefill(loaded(), machine, 2, context, None),
            )
            if not options:
                check(
                    f"{shape} top-k and top-p, decode, batch {rows[-1]}, context {context}",
                    "measured",
                    lambda: decode_step(loaded(), machine, rows[-1], context, None, **sampling),
                )


def _overlap(shape: str, machine: Machine, *, requests: int, prompt: int, output: int) -> dict[str, Any]:
    """Output tokens per second with the next step launched before a step's tokens are read, and without."""

    def rate(overlap: Literal["off", "on"]) -> float:
        tokens_per_s, _ = ours(_config(shape), machine, _prompts(shape, requests, prompt), output, overlap)
        _free()
        return tokens_per_s

    rates = {"off": rate("off"), "on": rate("on")}
    return {"passed": True, "ratio": rates["on"] / rates["off"], "tokens_per_s": rates}


def _prompts(shape: str, requests: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    width = _config(shape)["vocab_size"]
    return [torch.randint(2, width, (length,), generator=generator).tolist() for _ in range(requests)]


@contextmanager
def _loaded(shape: str, machine: Machine, **options: Any) -> Iterator[Callable[[], Loaded]]:
    """Loads at the first call, so that checks that are left out cost nothing; frees at the end."""
    held: list[Loaded] = []

    def load() -> Loaded:
        if not held:
            held.append(Loaded.random(_config(shape), machine, **options))
        return held[0]

    try:
        yield load
    finally:
        held.clear()
        _free()


def _throughput(
    shape: str, machine: Machine, *, requests: int, prompt: int, output: int, limit: float = 0.0
) -> dict[str, Any]:
    """Ours, then transformers', each alone on the GPU; output tokens per second."""
    config, prompts = _config(shape), _prompts(shape, requests, prompt)
    our_rate, details = ours(config, machine, prompts, output)
    _free()
    try:
        rate, with_start = theirs(config, machine, prompts[: max(2, requests // 2)], output)
        their_rate: float | None = rate
        details["transformers_start_included"] = with_start
    except Exception as error:
        details["transformers_error"] = f"{type(error).__name__}: {error}"
        their_rate = None
    _free()
    ratio = None if their_rate is None else our_rate / their_rate
    return {
        "passed": limit == 0.0 or (ratio is not None and ratio >= limit),
        "ratio": ratio,
        "tokens_per_s": our_rate,
        "transformers_tokens_per_s": their_rate,
        **details,
    }


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _config(shape: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SHAPES / f"{shape}.json").read_text())
    return config


def _circumstances(machine: Machine) -> dict[str, Any]:
    try:
        import triton

        version: str | None = triton.__version__
    except ImportError:
        version = None
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else platform.machine(),
        "dtype": str(machine.dtype),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version,
        "transformers": transformers.__version__,
        "copy_bandwidth_gb_per_s": machine.copy_bandwidth / 1e9,
        "matmul_tflop_per_s": machine.matmul_rate / 1e12,
        "command": " ".join(sys.argv),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="words, separated by commas: run checks whose names have one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=23.0)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
