"""A model that does not fit a GPU is refused, with what its weights need and what is free."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serve_app.errors import ConfigError

_GIB = 2**30


def free_bytes(device: torch.device) -> int | None:
    """Return what this process can allocate on a GPU; None on a CPU, where weights are mapped."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@contextmanager
def refuse_beyond_memory(name: str, needed: int, device: torch.device) -> Iterator[None]:
    """Raise ConfigError if `needed` bytes of weights do not fit, before or while they are loaded.

    No slower executor is tried: it would need as much.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise _too_large(name, needed, free, device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_large(name, needed, free, device) from error


def _too_large(name: str, needed: int, free: int | None, device: torch.device) -> ConfigError:
    found = "less" if free is None else f"{free / _GIB:.2f} GiB"
    return ConfigError(
        f"model {name}: out of memory on {device}: its weights need {needed / _GIB:.2f} GiB and some room to load "
        f"them, {found} was free; use `quantization: fp8`, a smaller model or a larger GPU, or free memory on {device}"
    )
