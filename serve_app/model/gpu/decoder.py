"""Runs a Llama-like model with nine kernels per layer: four products by torch, the rest in Triton.

Takes what `recognise` found in transformers' modules, whatever their name. That its numbers are the modules' own is not
decided here: the finished decoder is compared with them before it serves.
"""

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.model.attention.base import AttentionBatch, LayerCache
from serve_app.model.cpu.llama import GELU_TANH, Linear, Llama, LlamaLayer, NotLlamaError
from serve_app.model.gpu import ops
from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
from serve_app.model.gpu.graphs import (
    BUCKETS,
    TOKEN_BUCKETS,
    Attend,
    DecodeGraphs,
    MixedGraphs,
    Recorder,
    SamplingGraphs,
)
from serve_app.model.gpu.linear import FP8, GpuLinear
from serve_app.model.gpu.sampling import choose
from serve_app.model.stack import OnCapture

logger = logging.getLogger(__name__)


class GpuDecoder:
    """A `Stack`. The residual stream is rounded to the model's dtype after every sum, as in transformers.

    fp8, fp8_cache: weights, keys and values in 8 bits. With a deterministic backend no row's bits depend on the others.
    Raises NotLlamaError for what the kernels cannot do.
    """

    def __init__(
        self, model: Llama, backend: TritonAttention, max_model_len: int, *, fp8: bool = False, fp8_cache: bool = False
    ) -> None:
        self.backend = backend
        self.quantization = "fp8" if fp8 else "none"
        self.cache_dtype: torch.dtype = FP8 if fp8_cache else model.embedding.dtype
        device = model.embedding.device
        if 2 * model.cos.shape[1] != model.attention[0].head_dim:
            raise NotLlamaError("heads that are rotated in part")
        self._model = model

        def product(linear: Linear) -> GpuLinear:
            return GpuLinear.of(linear, fp8=fp8, invariant=backend.deterministic)

        self._head = product(model.head)
        self._products = [
            [product(linear) for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)] for layer in model.layers
        ]
        self._angles = (model.cos.float().to(device), model.sin.float().to(device))
        self._caches: Sequence[LayerCache] = ()
        self._max_model_len = max_model_len
        self._decode: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._sampling: SamplingGraphs | None = None

    def attach(self, caches: Sequence[LayerCache] | None) -> None:
        """See `Stack`."""
        # Graphs hold the addresses of the pool for which they were captured.
        self._decode = self._mixed = self._sampling = None
        self._caches = ()
        if caches is None:
            return
        self._caches = caches
        embedding, layer = self._model.embedding, self._model.attention[0]
        recorder = Recorder(embedding.device)
        self._decode = DecodeGraphs(self._run, recorder, self.backend, self._max_model_len, embedding.device)
        self._mixed = MixedGraphs(self._layers, self._attend, recorder, layer, embedding.dtype, embedding.device)
        self._sampling = SamplingGraphs(self._choose, recorder, embedding)

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """See `Stack`. Largest first: smaller graphs use its memory again."""
        for layer, cache in dict(zip(self._model.attention, self._caches, strict=True)).items():
            self.backend.warm_up(layer, self._model.embedding.dtype, cache)
        rows = [size for index, size in enumerate(BUCKETS) if index == 0 or BUCKETS[index - 1] < max_num_seqs]
        kinds = {"_mixed": TOKEN_BUCKETS, "_decode": rows, "_sampling": rows}
        done, of = 0, sum(map(len, kinds.values()))
        for name, sizes in kinds.items():
            graphs: DecodeGraphs | MixedGraphs | SamplingGraphs = getattr(self, name)
            try:
                for size in reversed(sizes):
                    if done % (of // 10) == 0:
                        on_capture(done, of)
                    graphs.captured(size)
                    done += 1
            except Exception as error:  # without them it is slower, and right
                logger.warning("runs without CUDA graphs of %s steps: %s", name[1:], error)
                setattr(self, name, None)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `Stack`. The next step overwrites the result, unless it is a large one."""
        metadata = self.backend.build(batch)
        if self._decode is not None and self._decode.takes(metadata):
            return self._decode(input_ids, positions, metadata)
        if self._mixed is not None and self._mixed.takes(metadata):
            return self._mixed(input_ids, positions, metadata)
        return self._run(input_ids, positions, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        return self._head(hidden)

    def choose(self, hidden: Tensor, params: Tensor) -> Tensor:
        """Token ids, as `sampling.choose`, of hidden states [R, hidden] whose logits nothing changes."""
        run = self._choose if self._sampling is None else self._sampling
        return run(hidden, params)

    def _choose(self, hidden: Tensor, params: Tensor) -> Tensor:
        return choose(self._head(hidden), params)

    def _run(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """Kernel launches only, so that a CUDA graph can hold it."""

        def attend(index: int, query: Tensor, out: Tensor) -> None:
            self._attend(index, query, out, metadata)

        layer = self._model.attention[0]
        query = self._model.embedding.new_empty(input_ids.shape[0], layer.num_heads, layer.head_dim)
        return self._layers(input_ids, positions, metadata.slots, attend, query, torch.empty_like(query))

    def _layers(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, attend: Attend, query: Tensor, out: Tensor
    ) -> Tensor:
        """query, out [N, heads, head_dim]: room for what goes into attention and comes out of it."""
        model, eps = self._model, self._model.eps
        residual = F.embedding(input_ids, model.embedding)
        x = None
        for index, (layer, products) in enumerate(zip(model.layers, self._products, strict=True)):
            to_qkv, to_out, to_gate_up, to_down = products
            qkv = to_qkv(ops.add_rms_norm(residual, x, layer.input_norm, eps))
            self._rotate(index, layer, qkv, positions, slots, query)
            attend(index, query, out)
            normed = ops.add_rms_norm(residual, to_out(out.flatten(1)), layer.post_norm, eps)
            x = to_down(ops.gate_times_up(to_gate_up(normed), gelu=model.activation == GELU_TANH))
        return ops.add_rms_norm(residual, x, model.final_norm, eps)

    def _rotate(
        self, index: int, layer: LlamaLayer, qkv: Tensor, positions: Tensor, slots: Tensor, query: Tensor
    ) -> None:
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm)
        cache = self._caches[index]
        # How many tokens a program takes decides in which order it sums up squares.
        few = positions.shape[0] <= 32 and not self.backend.deterministic
        ops.rotate_and_store(qkv, norms, self._model.eps, self._angles, positions, slots, cache, query, few=few)

    def _attend(self, index: int, query: Tensor, out: Tensor, metadata: TritonMetadata) -> None:
        self.backend.attend(self._model.attention[index], query, self._caches[index], metadata, out)
