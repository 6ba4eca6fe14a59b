"""Runs a Llama-like model with nine kernels per layer: four products by torch, the rest in Triton.

Takes what `recognise` found in transformers' modules, whatever their name. That its numbers are the modules' own is not
decided here: the finished decoder is compared with them before it serves.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.model.attention.base import AttentionBatch, LayerCache
from serve_app.model.cpu.llama import GELU_TANH, Linear, Llama, LlamaLayer, NotLlamaError
from serve_app.model.gpu import ops
from serve_app.model.gpu.attention import TritonAttention, TritonMetadata
from serve_app.model.gpu.graphs import BUCKETS, DecodeGraphs


class GpuDecoder:
    """A `Stack`. Weights stay in the model's dtype; the residual stream is rounded to it after every sum, as in
    transformers. Raises NotLlamaError for what the kernels cannot do."""

    backend = TritonAttention()
    quantization = "none"
    graph_sizes: Sequence[int] = BUCKETS

    def __init__(self, model: Llama, max_model_len: int) -> None:
        self.cache_dtype: torch.dtype = model.embedding.dtype
        device = model.embedding.device
        if 2 * model.cos.shape[1] != model.attention[0].head_dim:
            raise NotLlamaError("heads that are rotated in part")
        self._model = model
        self._angles = (model.cos.float().to(device), model.sin.float().to(device))
        self._caches: Sequence[LayerCache] = ()
        self._max_model_len = max_model_len
        self._graphs: DecodeGraphs | None = None

    def attach(self, caches: Sequence[LayerCache] | None) -> None:
        """See `Stack`."""
        # Graphs hold the addresses of the pool for which they were captured.
        self._graphs = None
        self._caches = ()
        if caches is not None:
            self._caches = caches
            device = self._model.embedding.device
            self._graphs = DecodeGraphs(self._run, self._max_model_len, self.backend.block_size, device)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `Stack`. The next step of single-token rows overwrites the result of such a step."""
        metadata = self.backend.build(batch)
        if self._graphs is not None and self._graphs.takes(metadata):
            return self._graphs(input_ids, positions, metadata)
        return self._run(input_ids, positions, metadata)

    def _run(self, input_ids: Tensor, positions: Tensor, metadata: TritonMetadata) -> Tensor:
        """Kernel launches only, so that a CUDA graph can hold it."""
        model = self._model
        residual = F.embedding(input_ids, model.embedding)
        x = None
        for index, layer in enumerate(model.layers):
            normed = ops.add_rms_norm(residual, x, layer.input_norm, model.eps)
            x = self._attend(index, layer, normed, positions, metadata)
            normed = ops.add_rms_norm(residual, x, layer.post_norm, model.eps)
            gated = ops.gate_times_up(_product(normed, layer.gate_up), gelu=model.activation == GELU_TANH)
            x = _product(gated, layer.down)
        return ops.add_rms_norm(residual, x, model.final_norm, model.eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        return _product(hidden, self._model.head)

    def _attend(
        self, index: int, layer: LlamaLayer, normed: Tensor, positions: Tensor, metadata: TritonMetadata
    ) -> Tensor:
        shape, cache = self._model.attention[index], self._caches[index]
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm)
        qkv = _product(normed, layer.qkv)
        query = ops.rotate_and_store(qkv, norms, self._model.eps, self._angles, positions, metadata.slots, cache)
        out = torch.empty_like(query)
        self.backend.attend(shape, query, cache, metadata, out)
        return _product(out.flatten(1), layer.out)


def _product(x: Tensor, linear: Linear) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)
