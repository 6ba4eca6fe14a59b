"""Runs transformers' own modules over packed rows and the paged pool, on any device and in any dtype.

The base model computes hidden states of all packed tokens; the head (whatever the model's own `forward` does after
its base, so logit scaling and capping are included) computes logits of chosen rows only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from serve_app.model.attention import registry
from serve_app.model.attention.base import AttentionBackend, AttentionBatch, LayerCache
from serve_app.model.fusion import optimize
from serve_app.model.linear import pad_rows
from serve_app.model.stack import OnCapture


class TransformersStack:
    """Takes a model over, as `split` left it, rewires and speeds it up."""

    quantization = "none"

    def __init__(
        self,
        head: Any,
        base: Any,
        hidden: "GivenHidden",
        calls: list[tuple[nn.Module, Any]],
        seen: list[tuple[nn.Module, Tensor]],
        backend: AttentionBackend,
        on_progress: Callable[[float], None],
    ) -> None:
        self.backend = backend
        self.cache_dtype: torch.dtype = next(head.parameters()).dtype
        self._head, self._base, self._hidden, self._calls = head, base, hidden, calls
        self._context = registry.StepContext(backend)
        registry.bind(calls, self._context)
        optimize(head, base, seen, on_progress)

    def attach(self, caches: Sequence[LayerCache] | None) -> None:
        """See `Stack`."""
        registry.attach_caches(self._calls, [None] * len(self._calls) if caches is None else caches)

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """There are none."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """See `Stack`."""
        tokens = input_ids.shape[0]
        ids, positions = pad_rows(input_ids), pad_rows(positions)
        self._context.metadata = self.backend.build(batch)
        try:
            hidden: Tensor = self._base(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0]
        finally:
            self._context.metadata = None
        return hidden[0, :tokens]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Stack`."""
        rows = hidden.shape[0]
        self._hidden.value = pad_rows(hidden)[None]
        ids = torch.zeros(self._hidden.value.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0, :rows]
        return logits


class GivenHidden(nn.Module):
    """Stands in for the base model inside the head: returns the hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    @property
    def decoder(self) -> "GivenHidden":
        """Some heads call their base's decoder directly."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """The given hidden states, once."""
        value, self.value = self.value, None
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=value)


def split(module: Any) -> tuple[Any, GivenHidden]:
    """Take the base model out of a causal LM; what remains in `module` is the head."""
    base = module.base_model
    hidden = GivenHidden()
    setattr(module, module.base_model_prefix, hidden)
    module.config._attn_implementation = registry.IMPLEMENTATION
    base.config._attn_implementation = registry.IMPLEMENTATION
    return base, hidden
