"""The C kernels as typed functions on tensors. Mirrors the structs of `kernels/*.h`; decides nothing.

Tensors must be contiguous; the wrappers check shapes that could make C read beyond a tensor's end.
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

GROUP = 32
"""Inputs of a group in the formats of bytes; activations share a scale in it."""
PAGE = 16
"""Tokens per KV block."""
CACHE_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""`enum cache_format` by the dtype of keys and values."""


class Format(IntEnum):
    """How a weight is stored; see `kernels/weights.h`."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3
    Q4S = 4
    Q4K = 5
    Q6K = 6


BITS = {Format.Q8: 8, Format.Q4: 4, Format.Q4S: 4, Format.Q4K: 4, Format.Q6K: 6}
"""Of a weight in the formats that fixed-point activations can meet."""


class Arithmetic(IntEnum):
    """How products are computed; `enum arithmetic` in `kernels/activations.h`."""

    EXACT = 0
    INT8 = 1
    BFLOAT16 = 2


class PanelStruct(ctypes.Structure):
    """`struct panel`."""

    _fields_ = [("data", c_void_p), ("format", c_int64)]


class WeightStruct(ctypes.Structure):
    """`struct weight`."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("fixed", c_int32),
    ]


class LayerStruct(ctypes.Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm", "keys", "values")),
        ("window", c_int64),
    ]


class DecoderStruct(ctypes.Structure):
    """`struct decoder`."""

    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "rotary_half", "activation", "arithmetic", "cache")),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding", WeightStruct),
        *((name, c_void_p) for name in ("final_norm", "cos", "sin")),
        ("layers", ctypes.POINTER(LayerStruct)),
    ]


class _AttentionStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "cache")),
        ("scale", c_float),
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
    """Some outputs of a matrix in panels of one format. data: uint8, contiguous; not writable where it is mapped from a
    file. exact: whether it has the values that were packed."""

    data: NDArray[np.uint8]
    format: Format
    outputs: int
    inputs: int
    exact: bool


class PackedWeight:
    """A matrix [outputs, inputs] in panels, with its bias [outputs] padded like them.

    All parts but the last one have whole panels of outputs.
    """

    def __init__(self, parts: Sequence[PackedPart], bias: Tensor | None, panel: int) -> None:
        self.parts = tuple(parts)
        self.outputs = sum(part.outputs for part in parts)
        self.inputs = parts[0].inputs
        self.exact = all(part.exact for part in parts)
        self.bfloat16 = all(part.format == Format.BF16 for part in parts)
        panels = []
        for part in parts:
            count = -(-part.outputs // panel)
            size = part.data.nbytes // count
            first = part.data.ctypes.data
            panels += [PanelStruct(first + index * size, part.format) for index in range(count)]
        self._panels = (PanelStruct * len(panels))(*panels)
        self.padded_outputs = panel * len(panels)
        padding = self.padded_outputs - self.outputs
        self._bias = None if bias is None else torch.cat([bias.detach().float(), torch.zeros(padding)])

    @property
    def nbytes(self) -> int:
        """Memory of the panels."""
        return sum(part.data.nbytes for part in self.parts)

    @property
    def mapped_bytes(self) -> int:
        """Of `nbytes`, what is mapped from a file."""
        return sum(part.data.nbytes for part in self.parts if not part.data.flags.writeable)

    def struct(self) -> WeightStruct:
        """For C; valid while this object lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        bits = [BITS.get(part.format, 0) for part in self.parts]
        fixed = max(bits) if all(bits) else 0
        return WeightStruct(ctypes.addressof(self._panels), bias, self.padded_outputs, self.inputs, fixed)


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
    """The compiled library of one build, and one pool of threads.

    Not thread-safe: a call uses the pool and the working memory until it returns.
    """

    def __init__(self, build: str, cache_dir: Path) -> None:
        self.build = build
        library = _declare(load_library(build, cache_dir))
        if not library.build_allowed():
            raise KernelsUnavailableError("the system does not let this process use it")
        self.library = Path(library._name).stem
        """Names the sources, the compiler and the flags."""
        self._library = library
        self.panel: int = self._library.weight_panel()
        dtypes = {format: dtype for dtype, format in CACHE_FORMATS.items()}
        self.narrow_cache = dtypes[self._library.narrow_cache()]
        """In which a KV cache is half as large."""
        self.smallest_cache = dtypes[self._library.smallest_cache()]
        """Where keys and values may be rounded to 8 bits; the same in builds without attention in bytes."""
        self.multiplies_bfloat16 = self.narrow_cache == torch.bfloat16
        self.has_tiles = build == "amx"
        self._pool: int | None = None
        self._pool_threads = 0
        self._free_pool: weakref.finalize[Any, Any] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def page_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one head's keys, or values, in a block of a cache in `dtype`."""
        return int(self._library.cache_page_bytes(head_dim, CACHE_FORMATS[dtype]))

    def pack(self, matrices: Sequence[StoredMatrix], format: Format, *, exactly: bool) -> PackedPart | None:
        """Pack matrices of equal inputs, one below the other, in one format. May run in several threads at once.

        None when `exactly` is asked for and a value does not fit, or the inputs are no whole groups of the format.
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
                raise ValueError(f"{matrix.data.nbytes} bytes are no matrix of {matrix.outputs} x {inputs} weights")
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
        """x [rows, inputs] float32 -> [rows, outputs] float32. In 8 bits or bfloat16 x is rounded first.

        Raises ValueError for bfloat16 where weight or machine have none."""
        out = torch.empty(x.shape[0], weight.padded_outputs)
        self._product(self._library.linear, weight, x, arithmetic, out)
        return out[:, : weight.outputs]

    def likeliest(self, weight: PackedWeight, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """As `linear`, but of each row the first of its largest outputs, int64 [rows]; -1 where any is not finite."""
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
    ) -> Tensor:
        """query [T, heads, dim], key and value [T, kv_heads, dim], float32 -> [T, heads, dim]. Writes the caches."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        struct = _AttentionStruct(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.sliding_window or 0,
            CACHE_FORMATS[caches[0].dtype],
            layer.scale,
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
        """Final hidden states [T, hidden] of token ids int64 [T]; of those that are not `wanted`, anything."""
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
        """The pool, of as many threads as torch's operations have here."""
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
"""What the library calls them."""


def _check_sizes(library: ctypes.CDLL) -> None:
    """Raise RuntimeError when a struct here and its twin in C differ in size: the kernels would read other memory."""
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
