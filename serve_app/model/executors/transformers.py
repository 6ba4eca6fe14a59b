"""Runs transformers' own modules over packed rows and the paged pool, on any device and in any
dtype.

The base model computes hidden states of all packed tokens. The head computes logits of selected
rows only. It is whatever the model's own `forward` does after its base, so logit scaling and
capping are included.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.attention import transformers_hook
from serve_app.model.attention.selection import pick_backend
from serve_app.model.attention_backend import AttentionBackend, AttentionBatch, LayerCache
from serve_app.model.executor import Demand, ModelExecutor, OnCapture, torch_build
from serve_app.model.facts import ModelFacts
from serve_app.model.fusion import optimize
from serve_app.model.input_batch import PackedBatch
from serve_app.model.linear import pad_rows
from serve_app.model.options import ModelOptions, Progress
from serve_app.model.slot_memory import SlotMemory
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.verification import TOLERANCE

NAME = "transformers' modules"


def demand(facts: ModelFacts, options: ModelOptions) -> Demand:
    """Required: this executor is tried last, and without it the model cannot be served."""
    return Demand.REQUIRED


def load(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """Build the model on its own modules, rewired and optimized. Raises ConfigError if its packed
    logits are wrong.
    """
    facts = source.facts
    backend = pick_backend(options.attention_backend, facts.layers, facts.dtype, facts.device)
    executor = TransformersExecutor(source, backend, lambda fraction: report("optimizing", fraction))
    report("verifying", 0.0)
    difference = source.reference.difference(executor, facts.layers)
    report("verifying", 1.0)
    if not difference <= TOLERANCE[facts.dtype]:
        raise ConfigError(
            f"model {facts.name}: {source.head.config.model_type} cannot be served: packed with another sequence, the "
            f"logits of {type(source.head).__name__} differ by {difference:.2g} standard deviations from the sequence "
            "run alone"
        )
    return executor


class TransformersExecutor:
    """A `ModelExecutor`. Takes over the source's modules, rewires them and optimizes them."""

    quantization = "none"
    likeliest = None
    mapped_bytes = 0

    def __init__(self, source: SourceModel, backend: AttentionBackend, on_progress: Callable[[float], None]) -> None:
        facts = source.facts
        self.backend = backend
        self.cache_dtype = facts.dtype
        self.build = torch_build(facts.device)
        self.weight_bytes = (facts.layer_weights + facts.head_weights) * facts.dtype.itemsize
        # The sampling kernels compute in float32.
        on_device = facts.device.type == "cuda" and facts.dtype != torch.float64
        self.choose = self._choose if on_device else None
        self._head, self._base, self._hidden = source.head, source.base, source.hidden
        self._calls = source.attention_calls
        self._caches: Sequence[LayerCache] = ()
        self._context = transformers_hook.StepContext(backend)
        transformers_hook.bind(self._calls, self._context)
        optimize(self._head, self._base, source.linear_inputs, on_progress)

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """See `ModelExecutor`."""
        self._caches = caches or ()
        transformers_hook.attach_caches(self._calls, [None] * len(self._calls) if caches is None else caches)

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Compile the attention kernels, if any. There are no graphs."""
        shapes = dict(zip((layer for _, layer in self._calls), self._caches, strict=True))
        for layer, cache in shapes.items():
            self.backend.warm_up(layer, self.cache_dtype, cache)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `ModelExecutor`."""
        tokens = input_ids.shape[0]
        ids, positions = pad_rows(input_ids), pad_rows(positions)
        self._context.metadata = self.backend.build(batch)
        try:
            hidden: Tensor = self._base(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0]
        finally:
            self._context.metadata = None
        return hidden[0, :tokens]

    def decode(self, packed: PackedBatch) -> None:
        """Return None: there are no graphs."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `ModelExecutor`."""
        rows = hidden.shape[0]
        self._hidden.value = pad_rows(hidden)[None]
        ids = torch.zeros(self._hidden.value.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0, :rows]
        return logits

    def _choose(self, hidden: Tensor, parameters: Tensor) -> Tensor:
        from serve_app.model.gpu.sampling import choose

        return choose(self.compute_logits(hidden).contiguous(), parameters)
