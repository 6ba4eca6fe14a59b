"""The host's work for one step of many decoding rows, for which the GPU must not wait. Needs no
GPU.

`python -m load_tests.gpu.host --json FILE` runs the engine's scheduler, runner and metadata with a
model whose forward pass takes no time and samples zeros. Figures are medians over steps in
milliseconds, on one thread, without launches and copies to the device.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.executor import Decoded
from serve_app.model.gpu import sampling
from serve_app.model.gpu.attention import TritonAttention
from serve_app.model.gpu.graphs import DecodeBuffer, DecodeGraphs, bucket_of
from serve_app.model.input_batch import PackedBatch
from serve_app.model.runner import ModelRunner
from serve_app.model.sampling.rows import SamplingRows

VOCAB = 1000


class NoModel:
    """The interface of a `PagedModel` for a runner, without a model."""

    block_size = TritonAttention.block_size
    keeps_tables = TritonAttention.keeps_tables
    samples_on_device = True
    device = torch.device("cpu")
    vocab_size = VOCAB

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._backend = TritonAttention()
        self._buffer = DecodeBuffer(self.device)

    def decode(self, packed: PackedBatch) -> Decoded | None:
        """Build the data for the device and return zeros."""
        if not DecodeGraphs.takes(packed):
            return None
        rows = len(packed.rows)
        self._buffer.send(packed, bucket_of(rows))
        return Decoded(torch.zeros(rows, 1), lambda: sampling.chosen(torch.zeros(rows, dtype=torch.int64)))

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Build only the metadata."""
        self._backend.build(batch)
        return torch.zeros(input_ids.shape[0], 1)

    def sample(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> sampling.Drawn:
        """Build the data for the device and return zeros."""
        return sampling.sample_plain(
            hidden, rows.parameters, lambda hidden, params: torch.zeros(len(hidden), dtype=torch.int64)
        )


def main() -> None:
    """Print the median of each part of a step and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = measure(args.rows, args.context, args.steps)
    medians = {name: 1e3 * statistics.median(times) for name, times in parts.items()}
    for name, median in medians.items():
        print(f"{name:10} {median:7.3f} ms")
    if args.json is not None:
        # needs more than the GPU bench does, which imports this module
        from serve_app.workloads.machine import machine

        result = {"rows": args.rows, "context": args.context, "steps": args.steps, "ms": medians}
        args.json.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")


def measure(rows: int, context: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each part of a step, and their sum."""
    length = context + steps + 8
    model: Any = NoModel(length)
    runner = ModelRunner(model, rows)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=rows * (length // model.block_size + 2),
            block_size=model.block_size,
            max_model_len=length,
            vocab_size=VOCAB,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * context,
            speculation="off",
        )
    )
    random = Random(0)
    for index in range(rows):
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=index, max_tokens=steps + 4, ignore_eos=True)
        scheduler.add(EngineRequest(str(index), tuple(random.choices(range(VOCAB), k=context)), params), 0.0)
    found: dict[str, list[float]] = defaultdict(list)
    while scheduler.has_unfinished:
        took = _step(scheduler, runner)
        if scheduler.stats().waiting == 0 and took.pop("rows") == rows == took.pop("tokens"):
            for name, seconds in {**took, "all": sum(took.values())}.items():
                found[name].append(seconds)
    return found


def _step(scheduler: Scheduler, runner: ModelRunner) -> dict[str, float]:
    took: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        took[name] = time.perf_counter() - begin
        return result

    output = timed("schedule", lambda: scheduler.schedule(0.0))
    pending = timed("execute", lambda: runner.finish(runner.launch(output)))
    result = timed("resolve", pending.resolve)
    timed("update", lambda: scheduler.update(output, result))
    return {**took, "rows": len(output.rows), "tokens": output.num_tokens}


if __name__ == "__main__":
    main()
