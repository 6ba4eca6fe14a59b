"""Models with images or sound around a language model ("wrappers"), of which only the language
model is served.

transformers' class of a wrapper has the layers of its text model somewhere inside its base model.
All other parts of the base are left out, and so are their weights. The rest of the wrapper is the
head.
"""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel

from serve_app.model.executor import UnsupportedModelError


def auto_class(config: Any) -> Any:
    """Return transformers' loader for a configuration. Raises UnsupportedModelError if there is
    none with a text model.
    """
    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in loader._model_mapping:
            return loader
    raise UnsupportedModelError(f"transformers has no causal language model of type {config.model_type}")


def is_wrapper(module: Any) -> bool:
    """Whether the module is built of a configuration that has another one for its text model."""
    return module.config.get_text_config() is not module.config


def layers_of(module: Any) -> Any:
    """Return the part of a causal LM that has the layers. Raises UnsupportedModelError for a
    wrapper in which they are not a model of their own.
    """
    if not is_wrapper(module) and module.base_model is not module:
        return module.base_model
    layers = module.get_decoder()
    own = isinstance(layers, PreTrainedModel) and layers.base_model is layers and layers.config is _text(module)
    if not own or module.base_model is module or not any(part is layers for part in module.base_model.children()):
        raise UnsupportedModelError(f"the text model inside {type(module).__name__} is not known")
    return layers


def keep_text(module: Any) -> frozenset[str]:
    """Remove all parts of a wrapper that are not for text, in place, and return their names. Does
    nothing to other models.
    """
    if not is_wrapper(module):
        return frozenset()
    layers, base = layers_of(module), module.base_model
    names = {name for name, part in base.named_children() if part is not layers}
    names |= dict(base.named_parameters(recurse=False)).keys()
    for name in names:
        setattr(base, name, None)
    return frozenset(names)


def replace_layers(module: Any, layers: Any) -> None:
    """Put another part with layers into the module."""
    base, old = module.base_model, layers_of(module)
    (name,) = (name for name, part in base.named_children() if part is old)
    setattr(base, name, layers)


def _text(module: Any) -> Any:
    return module.config.get_text_config()
