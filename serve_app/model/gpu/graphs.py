"""Steps as CUDA graphs, captured per *bucket*, a number of rows or tokens. Buffer addresses never
change.

A step is copied into the buffers of the smallest bucket that holds it. The rest of the bucket is
padding: rows without keys and tokens with a slot of -1, which read and write nothing. Two kinds of
steps are captured:
- Decode steps (single-token rows only, which all sample) are captured whole. The host sends all its
  data of a step in a single copy; the graph adds data that only the device has. Sampling is a
  separate graph, for rows whose logits are not modified.
- Mixed steps up to a size are captured in pieces. Attention is called between the pieces, because
  its launches depend on the rows.

Decides the buckets, the buffers and when a graph is captured: when its bucket is first used.
`capture` does this for all buckets in advance. Without a GPU the same code runs without graphs.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import Decoded
from serve_app.model.gpu import ops
from serve_app.model.gpu.attention import TritonAttention, TritonMetadata, decode_tiles
from serve_app.model.gpu.sampling import chosen
from serve_app.model.input_batch import PackedBatch
from serve_app.model.sampling.columns import Column
from serve_app.model.slot_memory import SlotMemory

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
"""Buckets of decode steps, in rows. Up to half the rows of a small bucket are padding, a fifth of a
large one.
"""
TOKEN_BUCKETS = (16, 32, 48, *range(64, 256, 32), *range(256, 1025, 64))
"""Buckets of mixed steps, in tokens. In larger steps, launching takes less time than computing."""


Run = Callable[[Tensor, Tensor, TritonMetadata], Tensor]


def bucket_of(rows: int) -> int:
    """Return the smallest bucket for a decode step of `rows` rows."""
    return BUCKETS[bisect_left(BUCKETS, rows)]


@dataclass(frozen=True, slots=True)
class _Captured:
    """Graphs, and the calls between them, in order. call: the captured function. It owns the
    tensors that the graphs read; graphs only keep addresses.
    """

    pieces: list[Callable[[], None]]
    out: Tensor
    call: Callable[..., Tensor]

    def __call__(self) -> Tensor:
        for piece in self.pieces:
            piece()
        return self.out


class Recorder:
    """Captures calls as graphs with one memory pool. Results are valid until the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._renew()

    def _renew(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def whole(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `call` as one graph. Without a GPU return `call` itself. Both return the same
        tensor every time.
        """
        if self._device.type != "cuda":
            return call
        pieces: list[Callable[[], None]] = []
        with self._capturing(call):
            self._begin()
            out = call()
            self._end(pieces)
        return _Captured(pieces, out, call)

    def pieces(self, call: Callable[[Callable[[Callable[[], None]], None]], Tensor]) -> Callable[[], Tensor]:
        """Capture `call` as several graphs. `call` passes work that must not be captured to its
        argument.
        """

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
        """Capture on a separate stream, after one run that compiles kernels and lets libraries
        allocate memory.
        """
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
        """End a capture in progress on the stream where it began: otherwise the thread's other GPU
        calls fail. Renew the pool and the stream, which may be unusable.
        """
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()
        self._renew()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU during the capture.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self, pieces: list[Callable[[], None]]) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        pieces.append(graph.replay)


class DecodeBuffer:
    """The host's data of a decode step on the device, at addresses that never change."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(BUCKETS[-1] * (4 + len(Column)), dtype=torch.int64, device=device)

    def rows(self, bucket: int) -> tuple[Tensor, Tensor]:
        """Return the bucket's tokens, int64 [4, bucket] as in `PackedBatch.host`, and parameters,
        float64 [bucket, len(Column)].
        """
        return self._split(self._numbers, bucket)

    @staticmethod
    def _split(numbers: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
        tokens, parameters = numbers[: 4 * bucket], numbers[4 * bucket : (4 + len(Column)) * bucket]
        return tokens.view(4, bucket), parameters.view(torch.float64).view(bucket, len(Column))

    def send(self, packed: PackedBatch | None, bucket: int) -> None:
        """Launch the single copy of a step of single-token rows that all sample. None: all rows are
        padding.
        """
        # torch does not reuse page-locked memory before the copy has finished
        pinned = self._numbers.is_cuda
        numbers = torch.zeros(bucket * (4 + len(Column)), dtype=torch.int64, pin_memory=pinned)
        # Padding rows are greedy: they need no search for thresholds.
        tokens, parameters = (part.numpy() for part in self._split(numbers, bucket))
        tokens[2] = -1
        if packed is not None:
            tokens[:, : len(packed.rows)] = packed.host
            parameters[: len(packed.rows)] = packed.sampling.parameters
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)


class DecodeGraphs:
    """Captured decode steps. `run(input_ids, positions, metadata)` returns hidden states,
    `choose(hidden, parameters)` token ids. The pool must not change.
    """

    def __init__(
        self, run: Run, choose: Callable[[Tensor, Tensor], Tensor], recorder: Recorder, backend: TritonAttention,
        max_model_len: int, memory: SlotMemory, hidden: Tensor,
    ) -> None:  # fmt: skip
        """memory: must have tables. hidden: any tensor with the width, dtype and device of hidden
        states.
        """
        rows, device = BUCKETS[-1], hidden.device
        assert memory.tables is not None
        self._run, self._choose, self._recorder = run, choose, recorder
        self._history, self._tables = memory.history, memory.tables
        self._tiles = partial(decode_tiles, max_model_len, backend.deterministic)
        self._buffer = DecodeBuffer(device)
        self._kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._table_lines = torch.zeros(rows, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._hidden = hidden.new_zeros(rows, hidden.shape[-1])
        self._calls: dict[int, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}

    @staticmethod
    def takes(packed: PackedBatch) -> bool:
        """Whether all rows have a single token and sample, and fit the largest bucket."""
        rows = len(packed.rows)
        return bool(rows == packed.host.shape[1] == len(packed.sampling.tokens) and rows <= BUCKETS[-1])

    def __call__(self, packed: PackedBatch) -> Decoded:
        """Launch the step. The next step overwrites its results."""
        rows = len(packed.rows)
        bucket = bucket_of(rows)
        forward, choose = self.captured(bucket)
        self._buffer.send(packed, bucket)
        return Decoded(forward()[:rows], lambda: chosen(choose()[:rows]))

    def captured(self, bucket: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return the calls that compute the first `bucket` rows: one for hidden states, one for
        their token ids.
        """
        calls = self._calls.get(bucket)
        if calls is None:
            self._buffer.send(None, bucket)
            forward = self._recorder.whole(partial(self._forward, bucket))
            calls = self._calls[bucket] = forward, self._recorder.whole(partial(self._sample, bucket))
        return calls

    def _forward(self, bucket: int) -> Tensor:
        tokens, _ = self._buffer.rows(bucket)
        kv_lens, table_lines = self._kv_lens[:bucket], self._table_lines[:bucket]
        ops.prepare(tokens, self._history, self._tables, kv_lens, table_lines, page=TritonAttention.block_size)
        input_ids, positions, slots, _ = tokens
        query_starts = self._query_starts[: bucket + 1]
        # Created in every run, so that the graph also captures the tiles.
        metadata = TritonMetadata(query_starts, kv_lens, self._tables, table_lines, slots, self._tiles)
        return self._hidden[:bucket].copy_(self._run(input_ids, positions, metadata))

    def _sample(self, bucket: int) -> Tensor:
        tokens, parameters = self._buffer.rows(bucket)
        token_ids = self._choose(self._hidden[:bucket], parameters)
        ops.remember(tokens, token_ids, self._history)
        return token_ids


Attend = Callable[[int, Tensor, Tensor], None]
"""Arguments: layer, query [N, heads, head_dim], out [N, heads, head_dim]. Writes `out`."""
RunInPieces = Callable[[Tensor, Tensor, Tensor, Attend, Tensor, Tensor], Tensor]
"""Arguments: input ids, positions and slots [N], attention, buffers for its query and output.
Returns hidden states [N, width].
"""


class MixedGraphs:
    """Calls `run` in captured pieces, and `attend` between them without capture."""

    def __init__(
        self, run: RunInPieces, attend: Callable[[int, Tensor, Tensor, TritonMetadata], None], recorder: Recorder,
        layer: AttentionLayer, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """layer: the shape of all layers; dtype: of queries."""
        tokens = TOKEN_BUCKETS[-1]
        self._run, self._attend, self._recorder = run, attend, recorder
        self._tokens = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        # All layers and buckets share these two tensors. Only they pass from pieces to calls that
        # are not captured.
        shape = (tokens, layer.num_heads, layer.head_dim)
        self._query = torch.zeros(shape, dtype=dtype, device=device)
        self._out = torch.zeros(shape, dtype=dtype, device=device)
        self._metadata: TritonMetadata | None = None
        self._calls: dict[int, Callable[[], Tensor]] = {}

    def takes(self, metadata: TritonMetadata) -> bool:
        """Whether the step has no more tokens than the largest bucket."""
        return bool(metadata.slots.shape[0] <= TOKEN_BUCKETS[-1])

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """Run the step. Returns a view [T, ...] that the next step overwrites."""
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
        """Return the call that computes the first `bucket` tokens of the buffers."""
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
        # During capture before the first step, there is no attention to compute.
        if self._metadata is not None:
            self._attend(layer, query, out, self._metadata)
