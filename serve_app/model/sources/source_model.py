"""A causal LM of transformers, taken apart: facts for all executors, and modules to build from."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from serve_app.errors import ConfigError
from serve_app.model.attention import transformers_hook
from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.facts import ModelFacts, count_weights, eos_token_ids
from serve_app.model.fusion import watch_inputs
from serve_app.model.rope import fix_frequencies
from serve_app.model.sources.wrappers import layers_of
from serve_app.model.verification import ReferenceLogits


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The parts of a model, and the logits of the original model.

    head: the causal LM, with its base replaced by `hidden`; base: the layers; attention_calls: the
    base's attention modules in call order; linear_inputs: its linear layers and their inputs in one
    run.
    """

    facts: ModelFacts
    head: Any
    base: Any
    hidden: "GivenHidden"
    attention_calls: list[tuple[nn.Module, AttentionLayer]]
    linear_inputs: list[tuple[nn.Module, Tensor]]
    reference: ReferenceLogits

    @classmethod
    def take(cls, module: Any, name: str, max_model_len: int | None) -> "SourceModel":
        """Take over `module`. Raises ConfigError with the type of a model that cannot be served.

        All layers must use transformers' attention interface, and the logits must be finite.
        """
        try:
            return cls._take(module, name, max_model_len)
        except UnsupportedModelError as error:
            raise ConfigError(f"model {name}: {module.config.model_type} cannot be served: {error}") from error

    @classmethod
    def _take(cls, module: Any, name: str, max_model_len: int | None) -> "SourceModel":
        transformers_hook.refuse_other_layers(module.config.get_text_config())
        if module.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{type(module).__name__} has no head that gives logits")
        module.requires_grad_(False)
        parameter = next(module.parameters())
        max_model_len = _max_model_len(module.config, max_model_len)
        layer_weights, head_weights = count_weights(module)
        hidden_size = module.get_output_embeddings().weight.shape[1]
        fix_frequencies(module, max_model_len)
        reference = ReferenceLogits.compute(module, name, max_model_len)
        base, hidden = _split(module)
        with watch_inputs(base) as linear_inputs:
            calls = transformers_hook.discover(base, reference.ids[0])
        _check_layers(module.config, calls)
        facts = ModelFacts(
            name=name,
            device=parameter.device,
            dtype=parameter.dtype,
            max_model_len=max_model_len,
            vocab_size=reference.logits[0].shape[1],
            eos_token_ids=eos_token_ids(module),
            layers=tuple(layer for _, layer in calls),
            layer_weights=layer_weights,
            head_weights=head_weights,
            hidden_size=hidden_size,
        )
        return cls(facts, module, base, hidden, calls, linear_inputs, reference)


class GivenHidden(nn.Module):
    """Replaces the base model inside the head: returns the hidden states it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    @property
    def decoder(self) -> "GivenHidden":
        """Return itself: some heads call their base's decoder directly."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> "_OnlyHidden":
        """Return the given hidden states and forget them."""
        value, self.value = self.value, None
        return _OnlyHidden(last_hidden_state=value)


class _OnlyHidden(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """Outputs of a base model, all None but the hidden states. Heads hand on the others (router
    logits, states of images), which are not used here.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _split(module: Any) -> tuple[Any, GivenHidden]:
    """Separate the layers from a causal LM. The rest of `module` is the head."""
    base = layers_of(module)
    hidden = GivenHidden()
    setattr(module, module.base_model_prefix, hidden)
    module.config._attn_implementation = transformers_hook.IMPLEMENTATION
    base.config._attn_implementation = transformers_hook.IMPLEMENTATION
    return base, hidden


def _check_layers(config: Any, calls: list[tuple[nn.Module, AttentionLayer]]) -> None:
    expected = config.get_text_config().num_hidden_layers
    modules = {id(module) for module, _ in calls}
    if len(modules) < expected:
        raise UnsupportedModelError(
            f"{len(modules)} of its {expected} layers use transformers' attention interface; all must use it"
        )
    if len(calls) != expected:
        raise UnsupportedModelError(f"it computes attention {len(calls)} times for {expected} layers, not once each")


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and (type(limit) is not int or limit < 2):
        raise ConfigError(f"model: `max_position_embeddings` of config.json must be an integer above 1, got {limit!r}")
    if wanted is None:
        if limit is None:
            raise ConfigError("max_model_len: the model does not state its context length; set it")
        return int(limit)
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ConfigError(f"max_model_len: {wanted} is not between 1 and the model's context length of {limit}")
    return wanted
