"""Runs a decoder's records: torch computes products of many rows, Triton everything else.

Takes the parts that `recognise` finds in transformers' modules of any name. Does not verify the
numbers: the caller compares the finished decoder with the modules before use.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache
from serve_app.model.executor import (
    Decoded,
    OnCapture,
    UnsupportedModelError,
    torch_build,
)
from serve_app.model.gpu import ops
from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
from serve_app.model.gpu.graphs import BUCKETS, TOKEN_BUCKETS, Attend, DecodeGraphs, MixedGraphs, Recorder
from serve_app.model.gpu.linear import FP8, GpuLinear
from serve_app.model.gpu.sampling import choose
from serve_app.model.input_batch import PackedBatch
from serve_app.model.records import Activation, DecoderRecord, Linear
from serve_app.model.slot_memory import SlotMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer. head_norms: weights [head_dim] of the query and key norm."""

    attention: AttentionLayer
    qkv: GpuLinear
    out: GpuLinear
    gate_up: GpuLinear
    down: GpuLinear
    attention_in: Tensor
    mlp_in: Tensor
    head_norms: tuple[Tensor, Tensor] | None


class GpuDecoder:
    """A `ModelExecutor`. The residual stream is rounded to the model's dtype after every sum, as in
    transformers.

    fp8: weights in 8 bits. fp8_cache: keys and values in 8 bits. With a deterministic backend no
    row's bits depend on other rows. Raises UnsupportedModelError for models that the kernels cannot
    run.
    """

    mapped_bytes = 0
    likeliest = None

    def __init__(
        self,
        model: DecoderRecord,
        backend: TritonAttention,
        max_model_len: int,
        *,
        fp8: bool = False,
        fp8_cache: bool = False,
    ) -> None:
        self.backend = backend
        self.quantization = "fp8" if fp8 else "none"
        self.cache_dtype: torch.dtype = FP8 if fp8_cache else model.embedding.dtype
        device = model.embedding.device
        self.build = torch_build(device)
        _check(model)
        shape = model.layers[0].attention
        if shape.value_dim != shape.head_dim:
            raise UnsupportedModelError(f"heads of {shape.head_dim} and values of {shape.value_dim} numbers")

        def product(linear: Linear) -> GpuLinear:
            return GpuLinear.of(linear, fp8=fp8, invariant=backend.deterministic)

        # Keep nothing else of the model: its weights would use memory next to the 8-bit ones.
        self._layers = [
            _Layer(
                attention=layer.attention,
                qkv=product(layer.qkv),
                out=product(layer.out),
                gate_up=product(layer.gate_up),
                down=product(layer.down),
                attention_in=layer.attention_in.weight,
                mlp_in=layer.mlp_in.weight,
                head_norms=None
                if layer.query_norm is None or layer.key_norm is None
                else (layer.query_norm.weight, layer.key_norm.weight),
            )
            for layer in model.layers
        ]
        self._head = product(model.head)
        self._embedding, self._final_norm = model.embedding, model.final_norm.weight
        self._eps, self._gelu = model.eps, model.activation is Activation.GELU_TANH
        self._angles = (model.rotations[0].cos.float().to(device), model.rotations[0].sin.float().to(device))
        self._caches: Sequence[LayerCache] = ()
        self._max_model_len = max_model_len
        self._decode: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None

    @property
    def weight_bytes(self) -> int:
        """See `ModelExecutor`."""
        products, vectors = [self._head], [self._final_norm]
        for layer in self._layers:
            products += layer.qkv, layer.out, layer.gate_up, layer.down
            vectors += layer.attention_in, layer.mlp_in, *(layer.head_norms or ())
        return sum(product.nbytes for product in products) + sum(vector.nbytes for vector in vectors)

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """See `ModelExecutor`."""
        # Graphs contain the addresses of the pool they were captured with.
        self._decode = self._mixed = None
        self._caches = ()
        if caches is None:
            return
        self._caches = caches
        embedding, layer = self._embedding, self._layers[0].attention
        recorder = Recorder(embedding.device)
        self._mixed = MixedGraphs(self._run_layers, self._attend, recorder, layer, embedding.dtype, embedding.device)
        if memory is not None:
            self._decode = DecodeGraphs(
                self._run, self.choose, recorder, self.backend, self._max_model_len, memory, embedding
            )

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """See `ModelExecutor`. Largest graphs first: smaller ones reuse their memory."""
        shapes: dict[AttentionLayer, LayerCache] = {}
        for layer, cache in zip(self._layers, self._caches, strict=True):
            shapes[layer.attention] = cache
        for shape, cache in shapes.items():
            self.backend.warm_up(shape, self._embedding.dtype, cache)
        rows = [size for index, size in enumerate(BUCKETS) if index == 0 or BUCKETS[index - 1] < max_num_seqs]
        kinds = {"_mixed": TOKEN_BUCKETS, "_decode": rows}
        done, of = 0, sum(map(len, kinds.values()))
        for name, sizes in kinds.items():
            graphs: DecodeGraphs | MixedGraphs = getattr(self, name)
            try:
                for size in reversed(sizes):
                    if done % max(1, of // 10) == 0:
                        on_capture(done, of)
                    graphs.captured(size)
                    done += 1
            except Exception as error:  # without graphs the model is slower but correct
                logger.warning("runs without CUDA graphs of %s steps: %s", name[1:], error)
                setattr(self, name, None)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ModelExecutor`. The next step overwrites the result, unless the step exceeds the
        largest graph.
        """
        metadata = self.backend.build(batch)
        if self._mixed is not None and self._mixed.takes(metadata):
            return self._mixed(input_ids, positions, metadata)
        return self._run(input_ids, positions, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `ModelExecutor`."""
        return self._head(hidden)

    def decode(self, packed: PackedBatch) -> Decoded | None:
        """See `ModelExecutor`."""
        return self._decode(packed) if self._decode is not None and self._decode.takes(packed) else None

    def choose(self, hidden: Tensor, params: Tensor) -> Tensor:
        """Return the token ids of hidden states [R, hidden] whose logits are not modified; see
        `sampling.choose`.
        """
        return choose(self._head(hidden), params)

    def _run(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """Run the layers with kernel launches only, so that a CUDA graph can capture them."""

        def attend(index: int, query: Tensor, out: Tensor) -> None:
            self._attend(index, query, out, metadata)

        layer = self._layers[0].attention
        query = self._embedding.new_empty(input_ids.shape[0], layer.num_heads, layer.head_dim)
        return self._run_layers(input_ids, positions, metadata.slots, attend, query, torch.empty_like(query))

    def _run_layers(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, attend: Attend, query: Tensor, out: Tensor
    ) -> Tensor:
        """Run the layers. query, out [N, heads, head_dim]: buffers for the input and output of
        attention.
        """
        eps = self._eps
        residual = F.embedding(input_ids, self._embedding)
        # The number of tokens per program determines the order in which squares are summed.
        few = input_ids.shape[0] <= 32 and not self.backend.deterministic
        x = None
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            qkv = layer.qkv(ops.add_rms_norm(residual, x, layer.attention_in, eps))
            ops.rotate_and_store(qkv, layer.head_norms, eps, self._angles, positions, slots, cache, query, few=few)
            attend(index, query, out)
            normed = ops.add_rms_norm(residual, layer.out(out.flatten(1)), layer.mlp_in, eps)
            x = layer.down(ops.gate_times_up(layer.gate_up(normed), gelu=self._gelu))
        return ops.add_rms_norm(residual, x, self._final_norm, eps)

    def _attend(self, index: int, query: Tensor, out: Tensor, metadata: TritonMetadata) -> None:
        self.backend.attend(self._layers[index].attention, query, self._caches[index], metadata, out)


def _shape(layer: AttentionLayer) -> tuple[object, ...]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.scale, layer.softcap


def _check(model: DecoderRecord) -> None:
    """Raise UnsupportedModelError for records that the kernels cannot run."""
    layers, first = model.layers, model.layers[0]
    for reason, found in {
        "layers without positions or with several kinds": any(layer.rotation != 0 for layer in layers),
        "norms of what is added to the residual stream": any(layer.attention_out or layer.mlp_out for layer in layers),
        "norms whose weights are stored minus one": model.final_norm.offset != 0,
        "a factor of the embedding": model.embedding_factor != 1,
        "layers of different shapes": len({_shape(layer.attention) for layer in layers}) > 1,
        "norms of values": any(layer.norm_values for layer in layers),
        "a factor of layers": any(layer.factor is not None for layer in layers),
        "a softcap of logits": model.softcap is not None,
    }.items():
        if found:
            raise UnsupportedModelError(reason)
    if 2 * model.rotations[0].cos.shape[1] != first.attention.head_dim:
        raise UnsupportedModelError("partially rotated heads")
