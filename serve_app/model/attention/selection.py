"""Which attention backend serves: the one that was asked for, or the fastest that gives the right numbers here."""

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
    """Imported only when it is asked for: Triton is not installed everywhere."""
    from serve_app.model.gpu.attention import TritonAttention

    return TritonAttention()


def _varlen() -> AttentionBackend:
    """Imported only when it is asked for: the oldest supported torch has no such function."""
    from serve_app.model.gpu.varlen import VarlenAttention

    return VarlenAttention()


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": TorchCpuAttention,
    "reference": ReferenceAttention,
    "triton": _triton,
    "varlen": _varlen,
}
_ORDER = {"cpu": ("cpu",), "cuda": ("triton", "varlen")}
"""What "auto" tries on a device, fastest first."""


def pick_backend(
    name: str, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest that agrees with the reference on this device.

    Raises ConfigError for an unknown name, or when the backend that was asked for does not agree with it.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"attention_backend: unknown name {name!r}; known: auto, {', '.join(sorted(_BACKENDS))}")
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
