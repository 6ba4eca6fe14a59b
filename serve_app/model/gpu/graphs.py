"""Steps as CUDA graphs: captured per *bucket*, a number of rows or tokens, over buffers whose addresses never change.

A step is copied into the buffers of the smallest bucket that holds it. What is left over of a bucket is padding: rows
without keys and tokens with a slot of -1, which read nothing and write nothing. Three kinds of work are captured:
- decode steps (single-token rows only), whole;
- sampling: from hidden states to token ids, since how many rows sample does not depend on the kind of step;
- mixed steps up to a size, in pieces: attention, whose launches depend on the rows, is called between them.

Decides the buckets, the buffers and when a graph is captured: when its bucket is first used, which `capture` does for
all. Without a GPU the same buffers are computed without a graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from serve_app.model.attention.base import AttentionLayer
from serve_app.model.gpu.attention import TritonAttention, TritonMetadata, decode_tiles
from serve_app.model.sampling_columns import Column

BUCKETS = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Rows. Up to half the rows of a bucket are padding for few rows, a fifth for many."""
TOKEN_BUCKETS = (16, 32, 48, *range(64, 256, 32), *range(256, 1025, 64))
"""Tokens of mixed steps. Beyond, launching takes less time than computing."""

Run = Callable[[Tensor, Tensor, TritonMetadata], Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    """Graphs and what is called between them, in order. call: what was captured, which owns the tensors that the graphs
    read; they themselves know only addresses."""

    pieces: list[Callable[[], None]]
    out: Tensor
    call: Callable[..., Tensor]

    def __call__(self) -> Tensor:
        for piece in self.pieces:
            piece()
        return self.out


class Recorder:
    """Captures calls as graphs that share one pool of memory, so their results last until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._renew()

    def _renew(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def whole(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`call` as one graph; without a GPU `call` itself. Both give the same tensor every time."""
        if self._device.type != "cuda":
            return call
        pieces: list[Callable[[], None]] = []
        with self._capturing(call):
            self._begin()
            out = call()
            self._end(pieces)
        return _Captured(pieces, out, call)

    def pieces(self, call: Callable[[Callable[[Callable[[], None]], None]], Tensor]) -> Callable[[], Tensor]:
        """`call` as graphs between the breaks that it makes: it hands what is not to be captured to its argument."""

        def at_once(live: Callable[[], None]) -> None:
            live()

        if self._device.type != "cuda":
            return partial(call, at_once)
        pieces: list[Callable[[], None]] = []

        def between(live: Callable[[], None]) -> None:
            self._end(pieces)
            live()
            pieces.append(live)
            self._begin()

        with self._capturing(partial(call, at_once)):
            self._begin()
            out = call(between)
            self._end(pieces)
        return _Captured(pieces, out, call)

    @contextmanager
    def _capturing(self, call: Callable[[], Tensor]) -> Iterator[None]:
        """On a stream of its own, after one run that compiles kernels and lets libraries allocate what they need."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                call()
                torch.cuda.synchronize(self._device)
                yield
            except Exception:
                self._give_up()
                raise
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _give_up(self) -> None:
        """End the capture, if there is one, on the stream where it began: what else the thread does would be refused.
        Pool and stream may not be fit for another one."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()
        self._renew()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self, pieces: list[Callable[[], None]]) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        pieces.append(graph.replay)


class DecodeGraphs:
    """Calls `run(input_ids, positions, metadata)` for decode steps, captured. The pool it uses must stay as it is."""

    def __init__(
        self, run: Run, recorder: Recorder, backend: TritonAttention, max_model_len: int, device: torch.device
    ) -> None:
        rows, blocks = BUCKETS[-1], -(-max_model_len // backend.block_size)
        self._run, self._recorder = run, recorder
        self._tiles = partial(decode_tiles, max_model_len, device, backend.deterministic)
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._calls: dict[int, Callable[[], Tensor]] = {}

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
        return self.captured(bucket)()[:rows]

    def captured(self, bucket: int) -> Callable[[], Tensor]:
        """The call that computes the buffers' first `bucket` rows."""
        call = self._calls.get(bucket)
        if call is None:
            call = self._calls[bucket] = self._recorder.whole(partial(self._run, *self._inputs(bucket)))
        return call

    def _inputs(self, bucket: int) -> tuple[Tensor, Tensor, TritonMetadata]:
        metadata = TritonMetadata(
            query_starts=self._query_starts[: bucket + 1],
            kv_lens=self._kv_lens[:bucket],
            tables=self._tables[:bucket],
            slots=self._slots[:bucket],
            plan=partial(self._tiles, bucket),
        )
        return self._input_ids[:bucket], self._positions[:bucket], metadata


class SamplingGraphs:
    """Calls `run(hidden, params)` captured: hidden [R, width], params float64 [R, len(Column)] -> int64 [R]."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], recorder: Recorder, hidden: Tensor) -> None:
        """hidden: any tensor of the width, dtype and device of hidden states."""
        rows = BUCKETS[-1]
        self._run, self._recorder = run, recorder
        self._hidden = hidden.new_zeros(rows, hidden.shape[-1])
        # Padding is greedy: no parameters of an earlier step are left to be searched by.
        self._params = torch.zeros(rows, len(Column), dtype=torch.float64, device=hidden.device)
        self._calls: dict[int, Callable[[], Tensor]] = {}

    def __call__(self, hidden: Tensor, params: Tensor) -> Tensor:
        """Token ids [R]: a view that the next call overwrites, unless there are more rows than any bucket has."""
        rows = hidden.shape[0]
        if rows > BUCKETS[-1]:
            return self._run(hidden, params)
        bucket = BUCKETS[bisect_left(BUCKETS, rows)]
        self._hidden[:rows] = hidden
        self._params[:rows] = params
        self._params[rows:bucket] = 0.0
        return self.captured(bucket)()[:rows]

    def captured(self, bucket: int) -> Callable[[], Tensor]:
        """The call that samples the buffers' first `bucket` rows."""
        call = self._calls.get(bucket)
        if call is None:
            inputs = (self._hidden[:bucket], self._params[:bucket])
            call = self._calls[bucket] = self._recorder.whole(partial(self._run, *inputs))
        return call


Attend = Callable[[int, Tensor, Tensor], None]
"""Layer, query [N, heads, head_dim], out [N, heads, head_dim], which it writes."""
RunInPieces = Callable[[Tensor, Tensor, Tensor, Attend, Tensor, Tensor], Tensor]
"""Input ids, positions and slots [N], attention, and room for its query and out -> hidden states [N, width]."""


class MixedGraphs:
    """Calls `run` in captured pieces, between which `attend` is called anew."""

    def __init__(
        self, run: RunInPieces, attend: Callable[[int, Tensor, Tensor, TritonMetadata], None], recorder: Recorder,
        layer: AttentionLayer, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """layer: the shape of all layers; dtype: of queries."""
        tokens = TOKEN_BUCKETS[-1]
        self._run, self._attend, self._recorder = run, attend, recorder
        self._tokens = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        # All layers and buckets share these two, the only tensors that pieces hand to what is not captured.
        shape = (tokens, layer.num_heads, layer.head_dim)
        self._query = torch.zeros(shape, dtype=dtype, device=device)
        self._out = torch.zeros(shape, dtype=dtype, device=device)
        self._metadata: TritonMetadata | None = None
        self._calls: dict[int, Callable[[], Tensor]] = {}

    def takes(self, metadata: TritonMetadata) -> bool:
        """Whether the step has no more tokens than the largest bucket."""
        return bool(metadata.slots.shape[0] <= TOKEN_BUCKETS[-1])

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """The step's result [T, ...]: a view that the next step overwrites."""
        tokens = input_ids.shape[0]
        bucket = TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, tokens)]
        ids, places = self._tokens
        torch._foreach_copy_(
            [ids[:tokens], places[:tokens], self._slots[:tokens]], [input_ids, positions, metadata.slots]
        )
        self._slots[tokens:bucket] = -1
        self._metadata = metadata
        try:
            return self.captured(bucket)()[:tokens]
        finally:
            self._metadata = None

    def captured(self, bucket: int) -> Callable[[], Tensor]:
        """The call that computes the buffers' first `bucket` tokens."""
        call = self._calls.get(bucket)
        if call is None:
            call = self._calls[bucket] = self._recorder.pieces(partial(self._pieces, bucket))
        return call

    def _pieces(self, bucket: int, between: Callable[[Callable[[], None]], None]) -> Tensor:
        def attend(layer: int, query: Tensor, out: Tensor) -> None:
            between(partial(self._live, layer, query, out))

        ids, places = self._tokens[:, :bucket]
        return self._run(ids, places, self._slots[:bucket], attend, self._query[:bucket], self._out[:bucket])

    def _live(self, layer: int, query: Tensor, out: Tensor) -> None:
        # While graphs are captured before the first step, there is nothing to attend to.
        if self._metadata is not None:
            self._attend(layer, query, out, self._metadata)
