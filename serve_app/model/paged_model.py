"""A transformers causal LM that runs over packed rows and a paged KV pool.

The base model computes hidden states of all packed tokens; the head (whatever the model's own `forward` does after
its base, so logit scaling and capping are included) computes logits of chosen rows only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.attention import registry
from serve_app.model.attention.base import AttentionBatch
from serve_app.model.fusion import optimize, watch_inputs
from serve_app.model.linear import pad_rows

Progress = Callable[[str, float], None]

_PROBE_LENGTHS = (13, 21)
_PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.5}
"""Largest accepted difference of the probe's logits from the model's own, as a part of their standard deviation.
(transformers computes softmax and norms in float32 whatever the dtype.)"""


class PagedModel:
    """The engine's view of a model. Built by `load_model` or `from_module`.

    Takes `module` over: its base is detached from it and rewired. Raises ConfigError for a model that cannot be
    served this way.
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        max_model_len: int | None = None,
        attention_backend: str = "auto",
        on_progress: Progress | None = None,
    ) -> None:
        report = on_progress or (lambda stage, fraction: None)
        parameter = next(module.parameters())
        self.name = name
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.max_model_len = _max_model_len(module.config, max_model_len)
        self.eos_token_ids = _eos_token_ids(module)
        with torch.inference_mode():
            probe_ids, expected = _own_logits(module, name)
            self.vocab_size = expected[0].shape[1]
            self._base, self._hidden = _split(module)
            self._head = module
            with watch_inputs(self._base) as seen:
                self._calls = registry.discover(self._base, probe_ids[0])
            _check_layers(name, module.config, self._calls)
            self._layers = [layer for _, layer in self._calls]
            self._backend = registry.pick_backend(attention_backend, self._layers, self.dtype, self.device)
            self._context = registry.StepContext(self._backend)
            registry.bind(self._calls, self._context)
            self._cache: kv_cache.KVCache | None = None
            optimize(module, self._base, seen, lambda fraction: report("optimizing", fraction))
            report("probing", 0.0)
            self._probe(probe_ids, expected)
            report("probing", 1.0)

    @property
    def block_size(self) -> int:
        """Tokens per KV block; the attention backend's choice."""
        return self._backend.block_size

    @property
    def attention_backend(self) -> str:
        """Name of the backend that was picked."""
        return self._backend.name

    def kv_bytes_per_block(self) -> int:
        """Memory of one KV block over all layers, in bytes."""
        return kv_cache.bytes_per_block(self._layers, self.block_size, self.dtype)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the pool (zeroed; block 0 is the null block), replacing an earlier one.

        Raises ConfigError when the memory cannot be had.
        """
        self._free_kv_cache()
        self._cache = kv_cache.KVCache(self._backend, self._layers, num_blocks, self.dtype, self.device)
        registry.attach_caches(self._calls, self._cache.layers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole KV blocks in every layer."""
        self._allocated().copy_blocks(copies)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states [T, hidden] of the packed tokens (input_ids, positions: int64 [T]); their keys and values
        are written into the pool on the way."""
        self._allocated()
        tokens = input_ids.shape[0]
        ids, positions = pad_rows(input_ids), pad_rows(positions)
        self._context.metadata = self._backend.build(batch)
        try:
            hidden: Tensor = self._base(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0]
        finally:
            self._context.metadata = None
        return hidden[0, :tokens]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden]; float32, or float64 for a float64 model."""
        rows = hidden.shape[0]
        self._hidden.value = pad_rows(hidden)[None]
        ids = torch.zeros(self._hidden.value.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0, :rows]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _allocated(self) -> kv_cache.KVCache:
        if self._cache is None:
            raise RuntimeError("allocate_kv_cache comes first")
        return self._cache

    def _free_kv_cache(self) -> None:
        # Before the new pool is allocated: both would not fit.
        self._cache = None
        registry.attach_caches(self._calls, [None] * len(self._calls))

    def _probe(self, ids: list[Tensor], expected: list[Tensor]) -> None:
        """Compare two sequences packed together (prompts first, then one more token each) with each run alone."""
        size = self.block_size
        blocks = [-(-row.shape[0] // size) for row in ids]
        tables = [range(1 + sum(blocks[:index]), 1 + sum(blocks[: index + 1])) for index in range(len(ids))]
        self.allocate_kv_cache(1 + sum(blocks))
        got: list[list[Tensor]] = [[] for _ in ids]
        for low, high in ((0, -1), (-1, None)):
            parts = [torch.arange(row.shape[0])[low:high] for row in ids]
            counts = [part.shape[0] for part in parts]
            batch = AttentionBatch(
                query_starts=[sum(counts[:index]) for index in range(len(ids) + 1)],
                kv_lens=[int(part[-1]) + 1 for part in parts],
                block_tables=list(tables),
                slot_mapping=torch.cat([table[0] * size + part for table, part in zip(tables, parts, strict=True)]).to(
                    self.device
                ),
            )
            packed = torch.cat([row[low:high] for row in ids])
            hidden = self.forward(packed, torch.cat(parts).to(self.device), batch)
            for row, logits in enumerate(torch.split(self.compute_logits(hidden), counts)):
                got[row].append(logits)
        self._free_kv_cache()
        for row, reference in enumerate(expected):
            worst = float((torch.cat(got[row]) - reference).abs().max() / reference.std())
            if not worst <= _PROBE_TOLERANCE[self.dtype]:
                raise ConfigError(
                    f"model {self.name}: {type(self._head).__name__} cannot be served: packed with another sequence "
                    f"its logits differ by {worst:.2g} standard deviations from the sequence run alone"
                )


class _GivenHidden(nn.Module):
    """Stands in for the base model inside the head: returns the hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    @property
    def decoder(self) -> "_GivenHidden":
        """Some heads call their base's decoder directly."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        value, self.value = self.value, None
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=value)


def _split(module: Any) -> tuple[Any, _GivenHidden]:
    """Take the base model out of a causal LM; what remains in `module` is the head."""
    base = module.base_model
    hidden = _GivenHidden()
    setattr(module, module.base_model_prefix, hidden)
    module.config._attn_implementation = registry.IMPLEMENTATION
    base.config._attn_implementation = registry.IMPLEMENTATION
    return base, hidden


def _own_logits(module: Any, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Random probe sequences, and their logits by the untouched model with transformers' own attention."""
    device = next(module.parameters()).device
    module.config._attn_implementation = "eager"
    width = module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, width, (length,), generator=generator).to(device) for length in _PROBE_LENGTHS]
    logits = [module(input_ids=row[None], use_cache=False).logits[0] for row in ids]
    if not all(bool(torch.isfinite(row).all()) for row in logits):
        raise ConfigError(f"model {name}: its weights give logits that are not finite; the files are damaged")
    wide = [row if row.dtype == torch.float64 else row.float() for row in logits]
    return ids, wide


def _check_layers(name: str, config: Any, calls: list[tuple[nn.Module, Any]]) -> None:
    expected = config.get_text_config().num_hidden_layers
    modules = {id(module) for module, _ in calls}
    if len(calls) != expected or len(modules) != expected:
        raise ConfigError(
            f"model {name}: {config.model_type} cannot be served: {len(modules)} of its {expected} layers use "
            "transformers' attention interface, all must"
        )


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ConfigError("max_model_len: the model does not tell its context length; set it")
        return limit
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ConfigError(f"max_model_len: {wanted} is not between 1 and the model's context length of {limit}")
    return wanted


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    for config in (module.generation_config, module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
