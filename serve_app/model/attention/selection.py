"""Selects the attention backend: the configured one, or the fastest that matches the reference on
this device.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from serve_app.errors import ConfigError
from serve_app.model.attention.reference import ReferenceAttention
from serve_app.model.attention.torch_cpu import TorchCpuAttention
from serve_app.model.attention.verification import verify_backend
from serve_app.model.attention_backend import AttentionBackend, AttentionLayer

logger = logging.getLogger(__name__)


def _triton() -> AttentionBackend:
    """Import the backend on first use: Triton is not installed everywhere."""
    from serve_app.model.gpu.attention import TritonAttention

    return TritonAttention()


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": TorchCpuAttention,
    "reference": ReferenceAttention,
    "triton": _triton,
}
_ORDER = {"cpu": ("cpu",), "cuda": ("triton",)}
"""Backends that "auto" tries on each device type, fastest first."""


def pick_backend(
    name: str, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """Return the backend called `name`. "auto" selects the fastest that matches the reference on
    this device.

    Raises ConfigError for an unknown name, or if a backend requested by name does not match the
    reference.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"attention_backend: unknown name {name!r}; known: auto, {', '.join(sorted(_BACKENDS))}")
    if any(layer.sinks for layer in layers):
        raise ConfigError("model: attention sinks are supported only by the C and the Triton kernels")
    candidates = _ORDER.get(device.type, ()) if name == "auto" else (name,)
    for wanted, otherwise in zip(candidates, (*candidates[1:], "the slow reference"), strict=True):
        try:
            backend = _BACKENDS[wanted]()
            problem = verify_backend(backend, layers, dtype, device)
        except ImportError as error:
            problem = str(error)
        if problem is None:
            return backend
        if name != "auto":
            raise ConfigError(f"attention_backend: {name} does not work for this model on {device}: {problem}")
        logger.warning("attention backend %s does not work here (%s); using %s", wanted, problem, otherwise)
    return ReferenceAttention()
