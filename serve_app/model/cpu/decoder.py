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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from serve_app.model.cpu.structs import MixtureStruct, WeightStruct
from serve_app.model.executor import OnCapture, UnsupportedModelError
from serve_app.model.input_batch import PackedBatch
from serve_app.model.options import Progress
from serve_app.model.records import DecoderRecord, Experts, Linear, Norm, Stack
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
    Blocks.MXFP4: {Format.MX4},
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
        (self._head, *own), self._weights = packing.pack_all(model, cache_dir, report)
        self._embedding = own[0] if own else self._head
        self._stacks: list[ctypes.Array[WeightStruct]] = []
        self._softcap = model.softcap
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
        return [self._head, *(weight for weights in self._weights for group in weights.values() for weight in group)]

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
        logits = self._kernels.linear(self._head, hidden, self._arithmetic)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    @property
    def likeliest(self) -> Callable[[Tensor], Tensor] | None:
        """See `ModelExecutor`. None with a softcap, which may make logits equal."""
        return None if self._softcap is not None else self._likeliest

    def _likeliest(self, hidden: Tensor) -> Tensor:
        return self._kernels.likeliest(self._head, hidden, self._arithmetic)

    def _describe(self, model: DecoderRecord, parameters: Parameters) -> DecoderStruct:
        """Return the structs for C. This object keeps the tensors that they point to."""
        for struct, layer, weights in zip(self._layers, model.layers, self._weights, strict=True):
            for name in _PRODUCTS:
                if name in weights:
                    setattr(struct, name, weights[name][0].struct())
            if layer.experts is not None:
                struct.experts.router = weights["router"][0].struct()
                struct.experts.gate_up, struct.experts.down = map(self._stack, (weights["gates"], weights["downs"]))
            if layer.sinks is not None:
                self._vectors.append(parameters.vector(layer.sinks))
                struct.sinks = self._vectors[-1].data_ptr()
            for name in _NORMS:
                setattr(struct, name, self._address(getattr(layer, name), parameters))
            if layer.norm_values:
                self._vectors.append(torch.ones(layer.attention.head_dim))
                struct.value_norm = self._vectors[-1].data_ptr()
            if layer.rotation is not None:
                rotation = model.rotations[layer.rotation]
                struct.cos, struct.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
                struct.rotary_half = rotation.cos.shape[1]
            for name in ("num_heads", "num_kv_heads", "head_dim", "scale"):
                setattr(struct, name, getattr(layer.attention, name))
            struct.window = layer.attention.sliding_window or 0
            struct.intermediate = 0 if layer.down is None else layer.down.inputs
            struct.factor = 1.0 if layer.factor is None else float(parameters.vector(layer.factor))
        return DecoderStruct(
            num_layers=len(model.layers),
            hidden=model.embedding.shape[1],
            activation=model.activation,
            arithmetic=self._arithmetic,
            cache=CACHE_FORMATS[self.cache_dtype],
            eps=model.eps,
            embedding_factor=model.embedding_factor,
            mixture=next((_mixture(layer.experts) for layer in model.layers if layer.experts), MixtureStruct()),
            embedding=self._embedding.struct(),
            final_norm=self._address(model.final_norm, parameters),
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
        )

    def _address(self, norm: Norm | None, parameters: Parameters) -> int | None:
        if norm is None:
            return None
        self._vectors.append(parameters.vector(norm.weight) + norm.offset)
        return self._vectors[-1].data_ptr()

    def _stack(self, weights: Sequence[PackedWeight]) -> int:
        """Return the address of the experts' structs."""
        self._stacks.append((WeightStruct * len(weights))(*(weight.struct() for weight in weights)))
        return ctypes.addressof(self._stacks[-1])


def _mixture(experts: Experts) -> MixtureStruct:
    return MixtureStruct(
        experts.count,
        experts.per_token,
        experts.down.inputs,
        experts.renormalised,
        experts.alpha,
        experts.limit,
    )


def _cache_dtype(kernels: Kernels, model: DecoderRecord, arithmetic: Arithmetic) -> torch.dtype:
    if arithmetic is Arithmetic.EXACT:
        return torch.float32
    # A bias can make all keys so large in some dimensions that one scale loses the others'
    # precision (Qwen 2).
    if arithmetic is Arithmetic.INT8 and not any(layer.qkv.biases for layer in model.layers):
        return kernels.smallest_cache
    return kernels.narrow_cache


@dataclass(frozen=True, slots=True)
class _Job:
    """Packs some matrices, and reads the bias of each."""

    pack: Callable[[], list[Matrix]]
    biases: Callable[[], list[Tensor | None]]


class _Packing:
    """Reads weights and packs each into the smallest format that the mode allows."""

    def __init__(self, kernels: Kernels, parameters: Parameters, arithmetic: Arithmetic) -> None:
        self.parameters = parameters
        self._kernels = kernels
        self._arithmetic = arithmetic

    def pack_all(
        self, model: DecoderRecord, cache_dir: Path | None, report: Progress
    ) -> tuple[list[PackedWeight], list[dict[str, list[PackedWeight]]]]:
        """Return the head (followed by the embedding if that is another matrix), and each layer's
        products by name: one matrix, or one for each expert.
        """
        head = _Job(partial(self._pack_head, model), lambda: [*self._bias(model.head), None])
        layers = [
            {name: self._job(linear) for name in _PRODUCTS if (linear := getattr(layer, name)) is not None}
            | ({} if layer.experts is None else self._expert_jobs(layer.experts))
            for layer in model.layers
        ]
        jobs = [head, *(job for layer in layers for job in layer.values())]
        identity = self.parameters.identity
        if identity is None:
            identity, cache_dir = ("", ""), None
        packed = pack_all(
            [job.pack for job in jobs], cache_dir, identity, self._arithmetic.name, self._kernels.library, report
        )
        weights = iter(
            [
                PackedWeight(matrix, bias, self._kernels.panel)
                for matrix, bias in zip(matrices, job.biases(), strict=False)
            ]
            for job, matrices in zip(jobs, packed, strict=True)
        )
        return next(weights), [{name: next(weights) for name in layer} for layer in layers]

    def _job(self, linear: Linear, *, floats: bool = False) -> _Job:
        return _Job(partial(self._pack, linear, floats=floats), lambda: self._bias(linear))

    def _expert_jobs(self, experts: Experts) -> dict[str, _Job]:
        stacks = {"gates": experts.gate_up, "downs": experts.down}
        return {
            "router": self._job(experts.router, floats=True),
            **{
                name: _Job(partial(self._pack_stack, stack), partial(self._biases, stack))
                for name, stack in stacks.items()
            },
        }

    def _bias(self, linear: Linear) -> list[Tensor | None]:
        biases = [self.parameters.vector(bias) for bias in linear.biases]
        return [torch.cat(biases) if biases else None]

    def _biases(self, stack: Stack) -> list[Tensor | None]:
        biases = self.parameters.expert_biases(stack)
        return [None] * stack.weight.shape[0] if biases is None else [*biases]

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

    def _pack(self, linear: Linear, *, floats: bool = False) -> list[Matrix]:
        """Pack the joined modules. floats: as floats, whatever the mode."""
        matrices = [self.parameters.matrix(weight) for weight in linear.weights]
        if floats:
            part = self._kernels.pack(matrices, Format.F32, exactly=True)
            assert part is not None  # this format holds all values
            return [[part]]
        matrix = self._pack_joined(matrices)
        for weight in linear.weights:
            self.parameters.release(weight)
        return [matrix]

    def _pack_stack(self, stack: Stack) -> list[Matrix]:
        """Pack the matrices of all experts."""
        packed = [self._pack_joined(self.parameters.expert(stack, index)) for index in range(stack.weight.shape[0])]
        self.parameters.release(stack.weight)
        return packed

    def _pack_joined(self, matrices: Sequence[StoredMatrix]) -> Matrix:
        """Pack joined matrices. They may differ in format if their outputs are whole panels."""
        whole = all(matrix.outputs % self._kernels.panel == 0 for matrix in matrices[:-1])
        alike = len({matrix.blocks for matrix in matrices}) == 1
        groups = [[matrix] for matrix in matrices] if whole and not alike else [matrices]
        return [self._pack_alike(group, self._arithmetic) for group in groups]

    def _pack_alike(self, matrices: Sequence[StoredMatrix], arithmetic: Arithmetic) -> PackedPart:
        exactly = arithmetic is Arithmetic.EXACT
        formats = frozenset(Format).intersection(*(_EXACT_FORMATS[matrix.blocks] for matrix in matrices))
        for format in sorted(formats, reverse=True):  # the smaller of two exact formats first
            if exactly or (format >= Format.Q8 and arithmetic is Arithmetic.INT8):
                packed = self._kernels.pack(matrices, format, exactly=True)
                if packed is not None:
                    return packed
        packed = self._kernels.pack(matrices, _ANY[arithmetic], exactly=exactly)
        assert packed is not None  # these formats hold all values, and `check_shapes` verified the widths
        return packed


def check_shapes(model: DecoderRecord) -> None:
    """Raise UnsupportedModelError for shapes that the kernels cannot run."""
    mixtures = [layer.experts for layer in model.layers if layer.experts is not None]
    if len({bytes(_mixture(layer.experts)) for layer in model.layers if layer.experts is not None}) > 1:
        raise UnsupportedModelError("mixtures of experts of several kinds")
    if any(each.per_token > each.count for each in mixtures):
        raise UnsupportedModelError("more experts of a token than there are")
    for layer in model.layers:
        if unsupported := unsupported_by_kernels(layer.attention):
            raise UnsupportedModelError(unsupported)
        widths = {"hidden states": layer.qkv.inputs, "attention": layer.out.inputs}
        if layer.down is not None:
            widths["an MLP"] = layer.down.inputs
        if layer.experts is not None:
            widths["an expert"] = layer.experts.down.inputs
        for name, width in widths.items():
            if width % GROUP:
                raise UnsupportedModelError(f"{name} of width {width}, not a multiple of {GROUP}")
