"""The C kernels as typed functions on tensors. Mirrors the structs of `kernels/*.h`; decides
nothing.

Tensors must be contiguous. The wrappers check shapes that could make C read beyond a tensor's end.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer
from serve_app.model.cpu.build import KernelsUnavailableError, load_library
from serve_app.model.cpu.stored import StoredMatrix
from serve_app.model.cpu.structs import ExpertsStruct, MixtureStruct, PanelStruct, WeightStruct

GROUP = 32
"""Inputs per group in the byte formats. The activations of a group share a scale."""
PAGE = 16
"""Tokens per KV block."""
CACHE_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Values of `enum cache_format`, by the dtype of keys and values."""


class Format(IntEnum):
    """Storage format of a weight; see `kernels/weights.h`."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3
    Q4S = 4
    MX4 = 5
    Q4K = 6
    Q6K = 7


BITS = {Format.Q8: 8, Format.Q4: 4, Format.Q4S: 4, Format.MX4: 5, Format.Q4K: 4, Format.Q6K: 6}
"""Bits of a stored weight, for the formats that fixed-point activations can multiply."""


class Arithmetic(IntEnum):
    """How products are computed: `enum arithmetic` in `kernels/activations.h`."""

    EXACT = 0
    INT8 = 1
    BFLOAT16 = 2


class LayerStruct(ctypes.Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("experts", ExpertsStruct),
        *(
            (name, c_void_p)
            for name in ("attention_in", "mlp_in", "attention_out", "mlp_out", "query_norm", "key_norm", "value_norm")
        ),
        *((name, c_void_p) for name in ("cos", "sin", "sinks", "keys", "values")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "intermediate")),
        ("rotary_half", c_int32),
        *((name, c_float) for name in ("scale", "factor")),
    ]


class DecoderStruct(ctypes.Structure):
    """`struct decoder`."""

    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "activation", "arithmetic", "cache")),
        *((name, c_float) for name in ("eps", "embedding_factor")),
        ("mixture", MixtureStruct),
        ("embedding", WeightStruct),
        ("final_norm", c_void_p),
        ("layers", ctypes.POINTER(LayerStruct)),
    ]


class _AttentionStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "cache")),
        ("scale", c_float),
        ("sinks", c_void_p),
    ]


class _BatchStruct(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("table_width", c_int64),
        *((name, c_void_p) for name in ("positions", "slots", "query_starts", "kv_lens", "blocks", "wanted")),
    ]


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some outputs of a matrix, in panels of one format.

    data: uint8, contiguous; not writable if mapped from a file. exact: whether the packed values
    equal the originals.
    """

    data: NDArray[np.uint8]
    format: Format
    outputs: int
    inputs: int
    exact: bool


class PackedWeight:
    """A matrix [outputs, inputs] in panels, with its bias [outputs] padded to whole panels.

    All parts but the last have whole panels of outputs.
    """

    def __init__(self, parts: Sequence[PackedPart], bias: Tensor | None, panel: int) -> None:
        self.parts = tuple(parts)
        self.outputs = sum(part.outputs for part in parts)
        self.inputs = parts[0].inputs
        self.exact = all(part.exact for part in parts)
        self.bfloat16 = all(part.format == Format.BF16 for part in parts)
        counts = [-(-part.outputs // panel) for part in parts]
        panels = np.empty((sum(counts), 2), np.int64)  # `struct panel`
        for part, count, end in zip(parts, counts, np.cumsum(counts), strict=True):
            panels[end - count : end, 0] = part.data.ctypes.data + part.data.nbytes // count * np.arange(count)
            panels[end - count : end, 1] = part.format
        self._panels = panels
        self.padded_outputs = panel * len(panels)
        padding = self.padded_outputs - self.outputs
        self._bias = None if bias is None else torch.cat([bias.detach().float(), torch.zeros(padding)])

    @property
    def nbytes(self) -> int:
        """Size of the panels in bytes."""
        return sum(part.data.nbytes for part in self.parts)

    @property
    def mapped_bytes(self) -> int:
        """The part of `nbytes` that is mapped from a file."""
        return sum(part.data.nbytes for part in self.parts if not part.data.flags.writeable)

    def struct(self) -> WeightStruct:
        """Return the struct for C. It is valid while this object lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        bits = [BITS.get(part.format, 0) for part in self.parts]
        fixed = max(bits) if all(bits) else 0
        return WeightStruct(self._panels.ctypes.data, bias, self.padded_outputs, self.inputs, fixed)


class Batch:
    """`struct batch` with the arrays it points to. positions: int64 [T]."""

    def __init__(self, batch: AttentionBatch, positions: Tensor) -> None:
        self.num_tokens, self.num_sequences = positions.shape[0], len(batch.kv_lens)
        self._arrays = [
            positions.contiguous(),
            batch.kv_slots.contiguous(),
            *(torch.from_numpy(np.array(numbers, dtype=np.int32)) for numbers in (batch.query_starts, batch.kv_lens)),
            torch.from_numpy(np.ascontiguousarray(batch.block_tables)),
        ]
        if batch.wanted is not None:
            self._arrays.append(torch.from_numpy(np.ascontiguousarray(batch.wanted)))
        self.struct = _BatchStruct(
            self.num_tokens,
            self.num_sequences,
            batch.block_tables.shape[1],
            *(array.data_ptr() for array in self._arrays),
        )


class Kernels:
    """The compiled library of one build, with one thread pool.

    Not thread-safe: each call uses the pool and the workspace until it returns.
    """

    def __init__(self, build: str, cache_dir: Path) -> None:
        self.build = build
        loaded, fingerprint = load_library(build, cache_dir)
        self.library = fingerprint
        """Identifies the build, the sources, the compiler and the flags."""
        library = _declare(loaded)
        if not library.build_allowed():
            raise KernelsUnavailableError("the system does not allow this process to use it")
        self._library = library
        self.panel: int = self._library.weight_panel()
        dtypes = {format: dtype for dtype, format in CACHE_FORMATS.items()}
        self.narrow_cache = dtypes[self._library.narrow_cache()]
        """The dtype of a KV cache of half the size."""
        self.smallest_cache = dtypes[self._library.smallest_cache()]
        """The dtype of a KV cache that may be rounded to 8 bits. Equals `narrow_cache` in builds
        without byte attention.
        """
        self.multiplies_bfloat16 = self.narrow_cache == torch.bfloat16
        self.has_tiles = build == "amx"
        self._pool: int | None = None
        self._pool_threads = 0
        self._free_pool: weakref.finalize[Any, Any] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def page_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return the size of one head's keys, or values, in one block of a cache in `dtype`."""
        return int(self._library.cache_page_bytes(head_dim, CACHE_FORMATS[dtype]))

    def pack(self, matrices: Sequence[StoredMatrix], format: Format, *, exactly: bool) -> PackedPart | None:
        """Pack matrices with the same inputs, one below the other, in one format. Thread-safe.

        Returns None if `exactly` is set and a value does not fit, or if the inputs are not whole
        groups of the format.
        """
        outputs, inputs = sum(matrix.outputs for matrix in matrices), matrices[0].inputs
        if inputs % self._library.weight_block(format):
            return None
        panels = -(-outputs // self.panel)
        data = torch.zeros(panels * self._library.weight_panel_bytes(format, inputs), dtype=torch.uint8).numpy()
        offset = 0
        for matrix in matrices:
            row_bytes = self._library.file_row_bytes(matrix.blocks, inputs)
            if matrix.inputs != inputs or not row_bytes or matrix.data.nbytes != row_bytes * matrix.outputs:
                raise ValueError(f"{matrix.data.nbytes} bytes are not a matrix of {matrix.outputs} x {inputs} weights")
            packed = self._library.weight_pack(
                matrix.data.ctypes.data,
                matrix.blocks,
                None if matrix.order is None else matrix.order.ctypes.data,
                *(matrix.outputs, inputs),
                *(format, exactly, offset, data.ctypes.data),
            )
            if not packed:
                return None
            offset += matrix.outputs
        return PackedPart(data, format, outputs, inputs, exactly)

    def linear(self, weight: PackedWeight, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Multiply: x [rows, inputs] float32 -> [rows, outputs] float32. int8 and bfloat16 round x
        first.

        Raises ValueError for bfloat16 if the weight is not bfloat16 or the CPU does not multiply
        it.
        """
        out = torch.empty(x.shape[0], weight.padded_outputs)
        self._product(self._library.linear, weight, x, arithmetic, out)
        return out[:, : weight.outputs]

    def likeliest(self, weight: PackedWeight, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Return the index of each row's largest output of `linear`, int64 [rows]. The first of
        equal ones; -1 if any is not finite.
        """
        ids = torch.empty(x.shape[0], dtype=torch.int64)
        self._product(self._library.likeliest, weight, x, arithmetic, ids, weight.outputs)
        return ids

    def _product(
        self, run: Any, weight: PackedWeight, x: Tensor, arithmetic: Arithmetic, out: Tensor, *sizes: int
    ) -> None:
        rows, inputs = x.shape
        if arithmetic is Arithmetic.BFLOAT16 and not (self.multiplies_bfloat16 and weight.bfloat16):
            raise ValueError("no product in bfloat16")
        if inputs != weight.inputs:
            raise ValueError(f"{inputs} inputs for a weight of {weight.inputs}")
        x, struct = x.contiguous(), ctypes.byref(weight.struct())
        memory = self._workspace(self._library.linear_workspace(struct, rows))
        run(self._threads(), struct, arithmetic, x.data_ptr(), rows, *sizes, memory, out.data_ptr())

    def attention(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: Batch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the caches and attend. query [T, heads, dim], key and value [T, kv_heads, dim],
        float32 -> [T, heads, dim]. sinks: float32 [heads].
        """
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        struct = _AttentionStruct(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.sliding_window or 0,
            CACHE_FORMATS[caches[0].dtype],
            layer.scale,
            None if sinks is None else sinks.data_ptr(),
        )
        pool, out = self._threads(), torch.empty_like(query)
        size = self._library.attention_workspace(
            ctypes.byref(struct), batch.num_tokens, batch.num_sequences, self._pool_threads
        )
        self._library.attention(
            ctypes.byref(struct),
            pool,
            ctypes.byref(batch.struct),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            caches[0].data_ptr(),
            caches[1].data_ptr(),
            self._workspace(size),
            out.data_ptr(),
        )
        return out

    def step(self, decoder: DecoderStruct, ids: Tensor, batch: Batch) -> Tensor:
        """Return the final hidden states [T, hidden] of token ids int64 [T]. Those that are not
        `wanted` are undefined.
        """
        ids = ids.contiguous()
        pool, hidden = self._threads(), torch.empty(batch.num_tokens, decoder.hidden)
        size = self._library.decoder_workspace(ctypes.byref(decoder), pool, ctypes.byref(batch.struct))
        self._library.decoder_step(
            ctypes.byref(decoder),
            pool,
            ctypes.byref(batch.struct),
            ids.data_ptr(),
            self._workspace(size),
            hidden.data_ptr(),
        )
        return hidden

    def _workspace(self, size: int) -> int:
        if self._memory.shape[0] < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()

    def _threads(self) -> int:
        """Return a pool of as many threads as torch uses here."""
        wanted = torch.get_num_threads()
        if self._pool is None or self._pool_threads != wanted:
            if self._free_pool is not None:
                self._free_pool()
            self._pool = self._library.pool_new(wanted)
            if not self._pool:
                raise MemoryError("no memory for the kernels' threads")
            self._pool_threads = wanted
            self._free_pool = weakref.finalize(self, self._library.pool_free, self._pool)
            self._free_pool.atexit = False
        return self._pool


_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "panel": PanelStruct,
    "weight": WeightStruct,
    "layer": LayerStruct,
    "decoder": DecoderStruct,
    "attention": _AttentionStruct,
    "batch": _BatchStruct,
}
"""The structs by their names in C."""


def _check_sizes(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if a struct's size differs from its size in C: the kernels would read
    other memory.
    """
    for name, struct in _STRUCTS.items():
        size_of = getattr(library, f"sizeof_{name}")
        size_of.restype, size_of.argtypes = c_int64, []
        if size_of() != ctypes.sizeof(struct):
            raise RuntimeError(f"struct {name} has {size_of()} bytes in C, {struct.__name__} {ctypes.sizeof(struct)}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    _check_sizes(library)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "build_allowed": (c_int64, []),
        "narrow_cache": (c_int64, []),
        "smallest_cache": (c_int64, []),
        "cache_page_bytes": (c_int64, [c_int64, c_int64]),
        "weight_panel": (c_int64, []),
        "weight_panel_bytes": (c_int64, [c_int64, c_int64]),
        "weight_block": (c_int64, [c_int64]),
        "file_row_bytes": (c_int64, [c_int64, c_int64]),
        "weight_pack": (c_int64, [c_void_p, c_int64, c_void_p, *[c_int64] * 5, c_void_p]),
        "linear_workspace": (c_int64, [c_void_p, c_int64]),
        "linear": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p]),
        "likeliest": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
        "attention_workspace": (c_int64, [c_void_p, c_int64, c_int64, c_int64]),
        "attention": (None, [c_void_p] * 10),
        "decoder_workspace": (c_int64, [c_void_p] * 3),
        "decoder_step": (None, [c_void_p] * 6),
        "pool_new": (c_void_p, [c_int]),
        "pool_free": (None, [c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
