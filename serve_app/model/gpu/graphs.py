"""Decode steps as CUDA graphs: one per *bucket*, a number of rows, captured over buffers whose addresses never change.

A step of single-token rows is copied into the buffers of the smallest bucket that holds it. The rows left over have no
keys and a slot of -1, so that they read nothing and write nothing. Decides the buckets, the buffers and when a graph is
captured: when its bucket is first used, which warming up does for all. Without a GPU the same buffers are computed
without a graph.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from serve_app.model.gpu.attention import TritonMetadata, decode_tiles

BUCKETS = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Up to half the rows of a bucket are padding for few rows, a fifth for many."""

Run = Callable[[Tensor, Tensor, TritonMetadata], Tensor]


class DecodeGraphs:
    """Calls `run(input_ids, positions, metadata)` for decode steps, captured. The pool it uses must stay as it is."""

    def __init__(self, run: Run, max_model_len: int, block_size: int, device: torch.device) -> None:
        rows, blocks = BUCKETS[-1], -(-max_model_len // block_size)
        self._run, self._max_model_len, self._device = run, max_model_len, device
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._calls: dict[int, Callable[[], Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def takes(self, metadata: TritonMetadata) -> bool:
        """Whether the step has single-token rows only, and no more than the largest bucket."""
        rows = metadata.kv_lens.shape[0]
        return rows == metadata.slots.shape[0] and rows <= BUCKETS[-1]

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """The step's result [R, ...]: a view that the next step overwrites."""
        rows, width = metadata.tables.shape
        bucket = BUCKETS[bisect_left(BUCKETS, rows)]
        torch._foreach_copy_(
            [self._input_ids[:rows], self._positions[:rows], self._slots[:rows]], [input_ids, positions, metadata.slots]
        )
        torch._foreach_copy_([self._kv_lens[:rows], self._tables[:rows, :width]], [metadata.kv_lens, metadata.tables])
        if rows < bucket:
            self._slots[rows:bucket] = -1
            self._kv_lens[rows:bucket] = 0
        call = self._calls.get(bucket)
        if call is None:
            call = self._calls[bucket] = self._captured(partial(self._run, *self._inputs(bucket)))
        return call()[:rows]

    def _inputs(self, bucket: int) -> tuple[Tensor, Tensor, TritonMetadata]:
        metadata = TritonMetadata(
            query_starts=self._query_starts[: bucket + 1],
            kv_lens=self._kv_lens[:bucket],
            tables=self._tables[:bucket],
            slots=self._slots[:bucket],
            plan=partial(decode_tiles, bucket, self._max_model_len, self._device),
        )
        return self._input_ids[:bucket], self._positions[:bucket], metadata

    def _captured(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._device.type != "cuda":
            return call
        # Once without capture: compiles kernels and lets libraries allocate what they need.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            out = call()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
