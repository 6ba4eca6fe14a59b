"""Measures the device's limits: the rates of a large copy and of a large product.

The best of a few runs counts: other work on the machine only makes runs slower.
"""

import time
from collections.abc import Callable

import torch

from serve_app.core.step_cost import DeviceLimits

_REPEATS = 5


@torch.inference_mode()
def measure_limits(device: torch.device, dtype: torch.dtype) -> DeviceLimits | None:
    """Measure the limits. Takes 0.1 s, and temporarily 0.5 GiB on a GPU. Returns None if that much
    is not free.
    """
    try:
        return DeviceLimits(bytes_per_s=_copy_rate(device), flops_per_s=_product_rate(device, dtype))
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _copy_rate(device: torch.device) -> float:
    size = (256 if device.type == "cuda" else 32) * 2**20
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=_generator(device))
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 512
    generator = _generator(device)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    return 2 * size**3 / _best(lambda: a @ b, device)


def _generator(device: torch.device) -> torch.Generator:
    """Return a generator for random data like a model's. Constant bits toggle less, so a GPU would
    use less power and keep a higher clock.
    """
    return torch.Generator(device).manual_seed(0)


def _best(run: Callable[[], object], device: torch.device) -> float:
    return min(call_times(run, device, _REPEATS, uncounted=1))


def call_times(run: Callable[[], object], device: torch.device, repeats: int, uncounted: int) -> list[float]:
    """Return the seconds of each of `repeats` calls, including all kernels they launch, after
    `uncounted` warm-up calls.
    """
    times = []
    for _ in range(uncounted + repeats):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[uncounted:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
