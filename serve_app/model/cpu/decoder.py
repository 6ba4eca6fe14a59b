"""Runs a decoder's records with the C kernels: packs the weights, then one call per step and one
for the logits.

There are three modes:
- Exact: the file's weights, stored as small as possible without loss. Products are in float32 or,
  where bytes are faster, in sums of 23-bit activations, which are as accurate. Keys and values are
  float32.
- Int8: weights of 8 bits, or 6 or 4 if the file has them. Products take activations rounded to 8
  bits in groups of 32; AMX tiles round both sides to bfloat16 instead. Keys and values are 8 bits.
  With AMX, or if keys have a bias, they are bfloat16 if the processor multiplies it, else float16.
- Bfloat16, on processors that multiply it: weights, the inputs of products, keys and values are
  bfloat16; sums and everything else are float32.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, LayerCache
from serve_app.model.cpu.attention import CKernelAttention, unsupported_by_kernels
from serve_app.model.cpu.ops import (
    CACHE_FORMATS,
    GROUP,
    Arithmetic,
    Batch,
    DecoderStruct,
    Format,
    Kernels,
    LayerStruct,
    PackedPart,
    PackedWeight,
)
from serve_app.model.cpu.packed_file import Matrix, pack_all
from serve_app.model.cpu.stored import Blocks, ModuleParameters, Parameters, StoredMatrix
from serve_app.model.executor import OnCapture, UnsupportedModelError
from serve_app.model.input_batch import PackedBatch
from serve_app.model.options import Progress
from serve_app.model.records import DecoderRecord, Linear, Norm
from serve_app.model.slot_memory import SlotMemory

_PRODUCTS = ("qkv", "out", "gate_up", "down")
_NORMS = ("attention_in", "mlp_in", "attention_out", "mlp_out", "query_norm", "key_norm")
_WIDENED = frozenset({Format.Q4, Format.Q8, Format.BF16})
_EXACT_FORMATS = {
    Blocks.Q4_0: {Format.Q4, Format.Q4S},
    Blocks.Q4_1: {Format.Q4},
    Blocks.Q4_K: {Format.Q4K},
    Blocks.Q5_0: {Format.Q8},
    Blocks.Q5_1: {Format.Q8},
    Blocks.Q8_0: {Format.Q8},
    Blocks.Q5_K: frozenset[Format](),
    Blocks.Q6_K: {Format.Q6K},
    Blocks.BF16: {Format.BF16},
    Blocks.F16: _WIDENED,
    Blocks.F32: _WIDENED,
}
"""Formats besides F32 that may hold a file's weights exactly. Floats may have been widened from 8
or 4 bits.
"""

_ANY = {Arithmetic.EXACT: Format.F32, Arithmetic.INT8: Format.Q8, Arithmetic.BFLOAT16: Format.BF16}
"""The fallback format of each mode, for weights of any values. All but F32 round them."""


class CpuDecoder:
    """A `ModelExecutor`.

    arithmetic: the mode. parameters: reads the weights of `model`. If it can identify them, the
    packed weights are kept in `cache_dir`.

    Raises UnsupportedModelError for shapes that the kernels cannot run.
    """

    choose = None

    def __init__(
        self,
        kernels: Kernels,
        model: DecoderRecord,
        *,
        arithmetic: Arithmetic,
        parameters: Parameters | None = None,
        cache_dir: Path | None = None,
        report: Progress = lambda stage, fraction: None,
    ) -> None:
        check_shapes(model)
        self.backend = CKernelAttention(kernels)
        self.cache_dtype = _cache_dtype(kernels, model, arithmetic)
        self._kernels = kernels
        self._arithmetic = arithmetic
        packing = _Packing(kernels, parameters or ModuleParameters(), arithmetic)
        self._vocabulary = model.embedding.shape[0]
        self._num_positions = min((rotation.cos.shape[0] for rotation in model.rotations), default=2**62)
        (self._head, *own), *weights = packing.pack_all(model, cache_dir, report)
        self._embedding = own[0] if own else self._head
        self._weights = [
            dict(zip(_PRODUCTS, (weight for (weight,) in weights[first : first + len(_PRODUCTS)]), strict=True))
            for first in range(0, len(weights), len(_PRODUCTS))
        ]
        self._vectors = [part for rotation in model.rotations for part in (rotation.cos, rotation.sin)]
        self._layers = (LayerStruct * len(model.layers))()
        self._struct = self._describe(model, packing.parameters)

    @property
    def quantization(self) -> str:
        """See `ModelExecutor`."""
        return "int8" if self._arithmetic is Arithmetic.INT8 else "none"

    @property
    def build(self) -> str:
        """See `ModelExecutor`."""
        return self._kernels.library

    @property
    def weight_bytes(self) -> int:
        """See `ModelExecutor`."""
        return sum(weight.nbytes for weight in self._products())

    @property
    def mapped_bytes(self) -> int:
        """See `ModelExecutor`."""
        own = [] if self._embedding is self._head else [self._embedding]
        return sum(weight.mapped_bytes for weight in [*self._products(), *own])

    def _products(self) -> list[PackedWeight]:
        return [self._head, *(weight for weights in self._weights for weight in weights.values())]

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """See `ModelExecutor`."""
        for index, struct in enumerate(self._layers):
            cache = None if caches is None else caches[index]
            struct.keys = None if cache is None else cache.key.data_ptr()
            struct.values = None if cache is None else cache.value.data_ptr()

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Do nothing: a CPU has no graphs."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ModelExecutor`. Raises IndexError for a token id or position out of range."""
        ids = input_ids.numpy().view(np.uint64)  # as unsigned numbers, negative ids are large
        if ids.max() >= self._vocabulary or positions.numpy().max() >= self._num_positions:
            raise IndexError("token ids or positions out of range")
        return self._kernels.step(self._struct, input_ids, Batch(batch, positions))

    def decode(self, packed: PackedBatch) -> None:
        """Return None: a CPU has no graphs."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `ModelExecutor`."""
        return self._kernels.linear(self._head, hidden, self._arithmetic)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """See `ModelExecutor`."""
        return self._kernels.likeliest(self._head, hidden, self._arithmetic)

    def _describe(self, model: DecoderRecord, parameters: Parameters) -> DecoderStruct:
        """Return the structs for C. This object keeps the tensors that they point to."""

        def address(norm: Norm | None) -> int | None:
            if norm is None:
                return None
            self._vectors.append(parameters.vector(norm.weight) + norm.offset)
            return self._vectors[-1].data_ptr()

        for struct, layer, weights in zip(self._layers, model.layers, self._weights, strict=True):
            for name, weight in weights.items():
                setattr(struct, name, weight.struct())
            for name in _NORMS:
                setattr(struct, name, address(getattr(layer, name)))
            if layer.rotation is not None:
                rotation = model.rotations[layer.rotation]
                struct.cos, struct.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            struct.window = layer.attention.sliding_window or 0
        attention = model.layers[0].attention
        return DecoderStruct(
            num_layers=len(model.layers),
            hidden=model.embedding.shape[1],
            intermediate=model.layers[0].down.inputs,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rotary_half=model.rotations[0].cos.shape[1] if model.rotations else 0,
            activation=model.activation,
            arithmetic=self._arithmetic,
            cache=CACHE_FORMATS[self.cache_dtype],
            eps=model.eps,
            scale=attention.scale,
            embedding_factor=model.embedding_factor,
            embedding=self._embedding.struct(),
            final_norm=address(model.final_norm),
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
        )


def _cache_dtype(kernels: Kernels, model: DecoderRecord, arithmetic: Arithmetic) -> torch.dtype:
    if arithmetic is Arithmetic.EXACT:
        return torch.float32
    # A bias can make all keys so large in some dimensions that one scale loses the others'
    # precision (Qwen 2).
    if arithmetic is Arithmetic.INT8 and not any(layer.qkv.biases for layer in model.layers):
        return kernels.smallest_cache
    return kernels.narrow_cache


class _Packing:
    """Reads weights and packs each into the smallest format that the mode allows."""

    def __init__(self, kernels: Kernels, parameters: Parameters, arithmetic: Arithmetic) -> None:
        self.parameters = parameters
        self._kernels = kernels
        self._arithmetic = arithmetic

    def pack_all(self, model: DecoderRecord, cache_dir: Path | None, report: Progress) -> list[list[PackedWeight]]:
        """Return the head (followed by the embedding if that is another matrix), then each layer's
        products.
        """
        linears = [model.head, *(getattr(layer, name) for layer in model.layers for name in _PRODUCTS)]
        jobs = [partial(self._pack_head, model), *(partial(self._pack, linear) for linear in linears[1:])]
        identity = self.parameters.identity
        if identity is None:
            identity, cache_dir = ("", ""), None
        packed = pack_all(jobs, cache_dir, identity, self._arithmetic.name, self._kernels.library, report)
        return [
            [PackedWeight(matrices[0], self._bias(linear), self._kernels.panel)]
            + [PackedWeight(matrix, None, self._kernels.panel) for matrix in matrices[1:]]
            for linear, matrices in zip(linears, packed, strict=True)
        ]

    def _bias(self, linear: Linear) -> Tensor | None:
        biases = [self.parameters.vector(bias) for bias in linear.biases]
        return torch.cat(biases) if biases else None

    def _pack_head(self, model: DecoderRecord) -> list[Matrix]:
        """Pack the head, and the embedding if it needs another matrix.

        In int8 mode the embedding is packed exactly too: its rows are read, not multiplied.
        """
        (head,) = self._pack(model.head)
        serves_both = self._arithmetic is Arithmetic.BFLOAT16 or all(part.exact for part in head)
        if model.head.weights[0] is model.embedding and serves_both:
            return [head]
        arithmetic = Arithmetic.EXACT if self._arithmetic is Arithmetic.INT8 else self._arithmetic
        return [head, [self._pack_alike([self.parameters.matrix(model.embedding)], arithmetic)]]

    def _pack(self, linear: Linear) -> list[Matrix]:
        """Pack the joined modules. They may differ in format if their outputs are whole panels."""
        matrices = [self.parameters.matrix(weight) for weight in linear.weights]
        whole = all(matrix.outputs % self._kernels.panel == 0 for matrix in matrices[:-1])
        alike = len({matrix.blocks for matrix in matrices}) == 1
        groups = [[matrix] for matrix in matrices] if whole and not alike else [matrices]
        parts = [self._pack_alike(group, self._arithmetic) for group in groups]
        for weight in linear.weights:
            self.parameters.release(weight)
        return [parts]

    def _pack_alike(self, matrices: Sequence[StoredMatrix], arithmetic: Arithmetic) -> PackedPart:
        exactly = arithmetic is Arithmetic.EXACT
        formats = frozenset(Format).intersection(*(_EXACT_FORMATS[matrix.blocks] for matrix in matrices))
        for format in sorted(formats, reverse=True):  # the smaller of two exact formats first
            if exactly or (format >= Format.Q8 and arithmetic is Arithmetic.INT8):
                packed = self._kernels.pack(matrices, format, exactly=True)
                if packed is not None:
                    return packed
        packed = self._kernels.pack(matrices, _ANY[arithmetic], exactly=exactly)
        assert packed is not None  # these formats hold all values, and `_check` verified the widths
        return packed


def check_shapes(model: DecoderRecord) -> None:
    """Raise UnsupportedModelError for shapes that the kernels cannot run."""
    if unsupported := unsupported_by_kernels(model.layers[0].attention):
        raise UnsupportedModelError(unsupported)
    if len({layer.down.inputs for layer in model.layers}) > 1:
        raise UnsupportedModelError("MLPs of several widths")
    if len({rotation.cos.shape[1] for rotation in model.rotations}) > 1:
        raise UnsupportedModelError("layers that rotate parts of several widths")
    layer = model.layers[0]
    for name, linear in (("hidden states", layer.qkv), ("attention", layer.out), ("an MLP", layer.down)):
        if linear.inputs % GROUP:
            raise UnsupportedModelError(f"{name} of width {linear.inputs}, not a multiple of {GROUP}")
