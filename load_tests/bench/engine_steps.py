"""Duration of the engine's steps without a server: decode with several batch sizes, and prefill.

The modes take turns, round after round, so that drift and other load affect them equally. CPU time
is reported beside wall time, because it is more reliable on a busy machine.

    python -m load_tests.bench.engine_steps --modes torch,none,int8,bfloat16 --json FILE
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.options import ModelOptions
from serve_app.workloads.machine import machine

MODES = {
    "torch": ModelOptions(attention_backend="cpu"),
    "none": ModelOptions(quantization="none"),
    "int8": ModelOptions(quantization="int8"),
    "bfloat16": ModelOptions(dtype="bfloat16"),
}
DECODE_ROWS = (1, 4, 16)
CONTEXT = 96
DECODE_STEPS = 16
PREFILL = 512


@dataclass
class Times:
    """Durations of steps in milliseconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return median and minimum."""
        return {
            "wall_median_ms": round(statistics.median(self.wall), 2),
            "wall_min_ms": round(min(self.wall), 2),
            "cpu_median_ms": round(statistics.median(self.cpu), 2),
        }


def timed_step(core: EngineCore, times: Times) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    core.step()
    times.wall.append((time.perf_counter() - wall) * 1e3)
    times.cpu.append((time.process_time() - cpu) * 1e3)


def request(rng: Random, tokens: int, max_tokens: int) -> EngineRequest:
    ids = tuple(rng.randrange(1000, 40_000) for _ in range(tokens))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(f"{rng.random()}", ids, params)


def measure(core: EngineCore, rng: Random, found: dict[str, Times]) -> None:
    """Run one round: prefill, then decode with each number of rows."""
    core.add(request(rng, PREFILL, 1))
    timed_step(core, found[f"prefill of {PREFILL} tokens"])
    for rows in DECODE_ROWS:
        for _ in range(rows):
            core.add(request(rng, CONTEXT, DECODE_STEPS + 2 + rows * CONTEXT // PREFILL))
        while core.stats().waiting or core.stats().running < rows:
            core.step()
        core.step()
        for _ in range(DECODE_STEPS):
            timed_step(core, found[f"decode of {rows} rows"])
        while core.has_unfinished:
            core.step()


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    cores = {
        mode: EngineCore.load(
            EngineConfig(
                model=MODES[mode],
                max_num_batched_tokens=PREFILL,
                kv_cache_gib=0.5,
                enable_prefix_cache=False,
                num_threads=args.threads,
                speculation="off",
            )
        )
        for mode in args.modes.split(",")
    }
    found: dict[str, dict[str, Times]] = {mode: defaultdict(Times) for mode in cores}
    for index in range(args.rounds + 1):
        for mode, core in cores.items():
            measure(core, Random(index), found[mode] if index else defaultdict(Times))
    result = {mode: {name: times.summary() for name, times in steps.items()} for mode, steps in found.items()}
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps({"threads": args.threads, **result, "machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
