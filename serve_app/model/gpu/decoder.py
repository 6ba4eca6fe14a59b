"""Runs a decoder's records: torch computes products of many rows, Triton everything else.

Takes the parts that `recognise` finds in transformers' modules of any name. Does not verify the
numbers: the caller compares the finished decoder with the modules before use.
"""

import logging
from collections.abc import Callable, Sequence
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
from serve_app.model.gpu.experts import GpuExperts
from serve_app.model.gpu.graphs import BUCKETS, TOKEN_BUCKETS, Attend, DecodeGraphs, MixedGraphs, Recorder
from serve_app.model.gpu.linear import GpuLinear
from serve_app.model.gpu.sampling import choose
from serve_app.model.gpu.weights import FP8, ModuleWeights, Weights
from serve_app.model.input_batch import PackedBatch
from serve_app.model.records import Activation, DecoderRecord, Experts, LayerRecord, Linear, Norm
from serve_app.model.slot_memory import SlotMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, as in `LayerRecord`. Norms are weights [width], see `ops.add_rms_norm`;
    head_norms: of queries and keys, [head_dim]. angles: cosines and sines, see
    `ops.rotate_and_store`.
    """

    attention: AttentionLayer
    qkv: GpuLinear
    out: GpuLinear
    gate_up: GpuLinear | None
    down: GpuLinear | None
    experts: GpuExperts | None
    attention_in: Tensor
    mlp_in: Tensor
    attention_out: Tensor | None
    mlp_out: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    angles: tuple[Tensor, Tensor] | None
    sinks: Tensor | None

    @property
    def products(self) -> list[GpuLinear | GpuExperts]:
        """The layer's products."""
        own = (self.qkv, self.out, self.gate_up, self.down, self.experts)
        return [product for product in own if product is not None]

    @property
    def norms(self) -> list[Tensor]:
        """The weights of the layer's norms."""
        own = (self.attention_in, self.mlp_in, self.attention_out, self.mlp_out, *(self.head_norms or ()))
        return [norm for norm in own if norm is not None]


class GpuDecoder:
    """A `ModelExecutor`. The residual stream is rounded to the model's dtype after every sum, as in
    transformers.

    weights: reads the record's parameters; by default they are in memory, and the decoder takes
    them over (`ModuleWeights`). fp8: weights in 8 bits. fp8_cache: keys and values in 8 bits. With
    a deterministic backend no row's bits depend on other rows. Raises UnsupportedModelError for
    models that the kernels cannot run.
    """

    mapped_bytes = 0
    likeliest = None

    def __init__(
        self,
        model: DecoderRecord,
        backend: TritonAttention,
        max_model_len: int,
        *,
        weights: Weights | None = None,
        fp8: bool = False,
        fp8_cache: bool = False,
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        _check(model)
        weights = weights or ModuleWeights(model.embedding)
        self.backend = backend
        self.quantization = "fp8" if fp8 else "none"
        self.cache_dtype: torch.dtype = FP8 if fp8_cache else weights.dtype
        self.build = torch_build(weights.device)
        # Keeps nothing else of the model: its weights would use memory next to the 8-bit ones.
        builder = _Builder(model, weights, fp8=fp8, invariant=backend.deterministic)
        self._layers: list[_Layer] = []
        for layer in model.layers:
            self._layers.append(builder.layer(layer))
            report(len(self._layers) / len(model.layers))
        self._final_norm = builder.norm(model.final_norm)
        self._head, self._embedding = builder.head_and_embedding()
        # transformers multiplies by the factor in the model's dtype.
        self._embedding_factor = torch.tensor(model.embedding_factor, dtype=weights.dtype).item()
        self._eps, self._gelu = model.eps, model.activation is Activation.GELU_TANH
        self._caches: Sequence[LayerCache] = ()
        self._max_model_len = max_model_len
        self._decode: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None

    @property
    def weight_bytes(self) -> int:
        """See `ModelExecutor`."""
        products: list[GpuLinear | GpuExperts] = [self._head]
        vectors = [self._final_norm]
        for layer in self._layers:
            products += layer.products
            vectors += layer.norms
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
        if self._embedding_factor != 1:
            residual *= self._embedding_factor
        # The number of tokens per program determines the order in which squares are summed.
        few = input_ids.shape[0] <= 32 and not self.backend.deterministic
        x = x_norm = None
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            qkv = layer.qkv(ops.add_rms_norm(residual, x, layer.attention_in, eps, x_norm))
            ops.rotate_and_store(qkv, layer.head_norms, eps, layer.angles, positions, slots, cache, query, few=few)
            attend(index, query, out)
            x = layer.out(out.flatten(1))
            normed = ops.add_rms_norm(residual, x, layer.mlp_in, eps, layer.attention_out)
            x, x_norm = self._mlp(layer, normed, slots), layer.mlp_out
        return ops.add_rms_norm(residual, x, self._final_norm, eps, x_norm)

    def _mlp(self, layer: _Layer, x: Tensor, slots: Tensor) -> Tensor:
        if layer.experts is not None:
            return layer.experts(x, slots)
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.down(ops.gate_times_up(layer.gate_up(x), gelu=self._gelu))

    def _attend(self, index: int, query: Tensor, out: Tensor, metadata: TritonMetadata) -> None:
        layer = self._layers[index]
        self.backend.attend(layer.attention, query, self._caches[index], metadata, out, layer.sinks)


class _Builder:
    """Puts the parts of a record on the device."""

    def __init__(self, model: DecoderRecord, weights: Weights, *, fp8: bool, invariant: bool) -> None:
        self._model = model
        self._weights = weights
        self._fp8 = fp8
        self._invariant = invariant
        self._angles = [(part.cos.to(weights.device), part.sin.to(weights.device)) for part in model.rotations]

    def layer(self, layer: LayerRecord) -> _Layer:
        query_norm, key_norm = layer.query_norm, layer.key_norm
        return _Layer(
            attention=layer.attention,
            qkv=self._product(layer.qkv),
            out=self._product(layer.out),
            gate_up=None if layer.gate_up is None else self._product(layer.gate_up),
            down=None if layer.down is None else self._product(layer.down),
            experts=None if layer.experts is None else self._experts(layer.experts),
            attention_in=self.norm(layer.attention_in),
            mlp_in=self.norm(layer.mlp_in),
            attention_out=None if layer.attention_out is None else self.norm(layer.attention_out),
            mlp_out=None if layer.mlp_out is None else self.norm(layer.mlp_out),
            head_norms=None if query_norm is None or key_norm is None else (self.norm(query_norm), self.norm(key_norm)),
            angles=None if layer.rotation is None else self._angles[layer.rotation],
            sinks=None if layer.sinks is None else self._weights.vector(layer.sinks),
        )

    def head_and_embedding(self) -> tuple[GpuLinear, Tensor]:
        """Return one tensor for both if they share a parameter that is not rounded."""
        head, embedding = self._product(self._model.head), self._model.embedding
        shared = embedding is self._model.head.weights[0] and head.scales is None
        return head, head.weight if shared else self._weights.joined([embedding])

    def norm(self, norm: Norm) -> Tensor:
        """Return the weight: in the model's dtype, or in float32 if it has an offset, as families
        with an offset multiply before they round.
        """
        weight = self._weights.vector(norm.weight)
        return weight.float() + norm.offset if norm.offset else weight

    def _product(self, linear: Linear) -> GpuLinear:
        product = GpuLinear.of(linear, self._weights, fp8=self._fp8, invariant=self._invariant)
        self._weights.replace(linear.weights, product.weight)
        return product

    def _experts(self, record: Experts) -> GpuExperts:
        experts = GpuExperts.of(record, self._model.activation, self._weights, fp8=self._fp8, invariant=self._invariant)
        self._weights.replace([record.gate_up.weight], experts.gate_up.weight)
        self._weights.replace([record.down.weight], experts.down.weight)
        return experts


def _shape(layer: AttentionLayer) -> tuple[object, ...]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.scale, layer.softcap


def _check(model: DecoderRecord) -> None:
    """Raise UnsupportedModelError for records that the kernels cannot run."""
    shape = model.layers[0].attention
    for reason, found in {
        f"heads of {shape.head_dim} and values of {shape.value_dim} numbers": shape.value_dim != shape.head_dim,
        "norms of queries or of keys alone": any(
            (layer.query_norm is None) != (layer.key_norm is None) for layer in model.layers
        ),
        "layers of different shapes": len({_shape(layer.attention) for layer in model.layers}) > 1,
        "norms of values": any(layer.norm_values for layer in model.layers),
        "a factor of layers": any(layer.factor is not None for layer in model.layers),
        "a softcap of logits": model.softcap is not None,
    }.items():
        if found:
            raise UnsupportedModelError(reason)
