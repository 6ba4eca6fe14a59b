"""Runs a Llama-like model with the C kernels: packs its weights, one call per step, one for the logits.

Two modes. Exact: the file's weights (stored as small as they can be without loss) in float32 arithmetic or, where bytes
are faster, in sums of 23-bit activations, which are as accurate; keys and values in float32. Int8: products
with activations rounded to 8 bits in groups of 32, weights of 8 bits or, where the file has them, 4; keys and values in
float16.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.model.attention.base import AttentionBatch, LayerCache
from serve_app.model.attention.c_kernels import CKernelAttention, unsupported_by_kernels
from serve_app.model.cpu.ops import GROUP, Batch, DecoderStruct, Format, Kernels, LayerStruct, PackedWeight
from serve_app.model.executors.base import OnCapture, UnsupportedModelError
from serve_app.model.input_batch import PackedBatch
from serve_app.model.llama import Linear, Llama
from serve_app.model.slot_memory import SlotMemory


class CpuDecoder:
    """A `ModelExecutor`. Starts in exact mode; `quantize` changes to int8.

    Raises UnsupportedModelError for shapes that the kernels cannot run.
    """

    choose = None

    def __init__(self, kernels: Kernels, model: Llama) -> None:
        _check(model)
        self.backend = CKernelAttention(kernels)
        self.cache_dtype = torch.float32
        self._kernels = kernels
        self._model: Llama | None = model
        self._embedding = model.embedding.contiguous()
        self._num_positions = model.cos.shape[0]
        self._weights = [
            {name: self._pack(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
            for layer in model.layers
        ]
        self._head = self._pack(model.head)
        self._kept = [self._embedding, model.final_norm, model.cos, model.sin]
        self._layers = (LayerStruct * len(model.layers))()
        self._struct = self._describe(model)

    @property
    def quantization(self) -> str:
        """See `ModelExecutor`."""
        return "int8" if self._struct.int8 else "none"

    @property
    def build(self) -> str:
        """See `ModelExecutor`."""
        return self._kernels.library

    @property
    def weight_bytes(self) -> int:
        """See `ModelExecutor`."""
        packed = [self._head, *(weight for weights in self._weights for weight in weights.values())]
        return sum(weight.data.nbytes for weight in packed)

    @property
    def token_cost(self) -> float:
        """See `ModelExecutor`."""
        return 0.1 if self._struct.int8 else 0.25

    def quantize(self) -> None:
        """Change to int8 mode."""
        model = self._model
        if model is None:
            raise RuntimeError("the original weights were released")
        for layer, weights in zip(model.layers, self._weights, strict=True):
            for name, weight in weights.items():
                weights[name] = self._pack_8_bits(weight, getattr(layer, name))
        self._head = self._pack_8_bits(self._head, model.head)
        self.cache_dtype = torch.float16
        self._struct = self._describe(model)
        self._struct.int8 = True

    def release(self) -> None:
        """Drop the original weights; after this the mode is fixed."""
        self._model = None

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """See `ModelExecutor`."""
        for index, struct in enumerate(self._layers):
            cache = None if caches is None else caches[index]
            struct.keys = None if cache is None else cache.key.data_ptr()
            struct.values = None if cache is None else cache.value.data_ptr()

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """There are no graphs on a CPU."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ModelExecutor`. Raises IndexError for a token id or a position that does not exist."""
        ids = input_ids.numpy()
        if ids.min() < 0 or ids.max() >= self._embedding.shape[0] or positions.numpy().max() >= self._num_positions:
            raise IndexError("token ids or positions out of range")
        return self._kernels.step(self._struct, input_ids, Batch(batch, positions))

    def decode(self, packed: PackedBatch) -> None:
        """There are no graphs."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `ModelExecutor`."""
        return self._kernels.linear(self._head, hidden, int8=bool(self._struct.int8))

    def _pack(self, linear: Linear) -> PackedWeight:
        """In the smallest format that holds every value exactly."""
        for format in (Format.Q4, Format.Q8, Format.BF16):
            packed = self._kernels.pack(linear.weight, linear.bias, format, exactly=True)
            if packed is not None:
                return packed
        packed = self._kernels.pack(linear.weight, linear.bias, Format.F32, exactly=True)
        assert packed is not None
        return packed

    def _pack_8_bits(self, weight: PackedWeight, linear: Linear) -> PackedWeight:
        if weight.format in (Format.Q4, Format.Q8):
            return weight
        packed = self._kernels.pack(linear.weight, linear.bias, Format.Q8, exactly=False)
        assert packed is not None
        return packed

    def _describe(self, model: Llama) -> DecoderStruct:
        """The structs for C. What they point to is kept by this object."""
        for struct, layer, weights, attention in zip(
            self._layers, model.layers, self._weights, model.attention, strict=True
        ):
            for name, weight in weights.items():
                setattr(struct, name, weight.struct())
            for name in ("input_norm", "post_norm", "query_norm", "key_norm"):
                norm: Tensor | None = getattr(layer, name)
                setattr(struct, name, None if norm is None else norm.data_ptr())
                if norm is not None:
                    self._kept.append(norm)
            struct.window = attention.sliding_window or 0
        attention = model.attention[0]
        return DecoderStruct(
            num_layers=len(model.layers),
            hidden=self._embedding.shape[1],
            intermediate=model.layers[0].down.weight.shape[1],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rotary_half=model.cos.shape[1],
            activation=model.activation,
            eps=model.eps,
            scale=attention.scale,
            embedding=self._embedding.data_ptr(),
            final_norm=model.final_norm.data_ptr(),
            cos=model.cos.data_ptr(),
            sin=model.sin.data_ptr(),
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
        )


def _check(model: Llama) -> None:
    """Raise UnsupportedModelError for shapes that the kernels cannot run."""
    if unsupported := unsupported_by_kernels(model.attention[0]):
        raise UnsupportedModelError(unsupported)
    if len({layer.down.weight.shape for layer in model.layers}) > 1:
        raise UnsupportedModelError("MLPs of several widths")
    layer = model.layers[0]
    for name, linear in (("hidden states", layer.qkv), ("attention", layer.out), ("an MLP", layer.down)):
        width = linear.weight.shape[1]
        if width % GROUP:
            raise UnsupportedModelError(f"{name} of width {width}, not a multiple of {GROUP}")
