"""Runs a Llama-like model with the C kernels: packs its weights, one call per step, one for the logits.

Two modes. Exact: the file's weights (stored as small as they can be without loss) in float32 arithmetic or, where bytes
are faster, in sums of 23-bit activations, which come as near to the truth; keys and values in float32. Int8: products
with activations rounded to 8 bits in groups of 32, weights of 8 bits or, where the file has them, 4; keys and values in
float16.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.model.attention.base import AttentionBatch, LayerCache
from serve_app.model.cpu.attention import KernelAttention
from serve_app.model.cpu.llama import Linear, Llama
from serve_app.model.cpu.ops import Batch, DecoderStruct, Format, Kernels, LayerStruct, PackedWeight
from serve_app.model.stack import OnCapture


class CpuDecoder:
    """A `Stack`. Starts in exact mode; `quantize` changes to int8."""

    def __init__(self, kernels: Kernels, model: Llama) -> None:
        self.backend = KernelAttention(kernels)
        self.cache_dtype = torch.float32
        self._kernels = kernels
        self._model: Llama | None = model
        self._embedding = model.embedding.contiguous()
        self._vocab_size = model.head.weight.shape[0]
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
        """See `Stack`."""
        return "int8" if self._struct.int8 else "none"

    @property
    def formats(self) -> str:
        """How the weights are stored, for people."""
        used = {weight.format.name for weights in self._weights for weight in weights.values()}
        return "+".join(sorted(used | {self._head.format.name})).lower()

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """There are no graphs on a CPU."""

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights that a step reads."""
        packed = [self._head, *(weight for weights in self._weights for weight in weights.values())]
        return sum(weight.data.nbytes for weight in packed)

    def quantize(self) -> None:
        """Change to int8 mode."""
        model = self._model
        if model is None:
            raise RuntimeError("the weights were released")
        for layer, weights in zip(model.layers, self._weights, strict=True):
            for name, weight in weights.items():
                weights[name] = self._pack_8_bits(weight, getattr(layer, name))
        self._head = self._pack_8_bits(self._head, model.head)
        self.cache_dtype = torch.float16
        self._struct = self._describe(model)
        self._struct.int8 = True

    def release(self) -> None:
        """Let the original weights go; after this the mode is fixed."""
        self._model = None

    def attach(self, caches: Sequence[LayerCache] | None) -> None:
        """See `Stack`."""
        for index, struct in enumerate(self._layers):
            cache = None if caches is None else caches[index]
            struct.keys = None if cache is None else cache.key.data_ptr()
            struct.values = None if cache is None else cache.value.data_ptr()

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `Stack`. Raises IndexError for a token id or a position that does not exist."""
        ids = input_ids.numpy()
        if ids.min() < 0 or ids.max() >= self._embedding.shape[0] or positions.numpy().max() >= self._num_positions:
            raise IndexError("token ids or positions out of range")
        return self._kernels.step(self._struct, input_ids, Batch(batch, positions))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
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
