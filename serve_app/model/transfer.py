"""Copies between host and device without blocking the host.

torch's plain `.to(device)` from ordinary host memory waits until the GPU has finished all earlier
work, so a single such copy per step keeps host and GPU from working in parallel. Page-locked memory
is copied asynchronously.
"""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device. Kernels launched later see the copy. On a CPU the tensor shares
    the array's memory.
    """
    host = torch.from_numpy(array)
    # torch does not reuse page-locked memory before the copy has finished.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class ToHost:
    """Asynchronous copies of device tensors to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return the tensors on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
