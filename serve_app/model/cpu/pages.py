"""Zeroed memory for a KV pool, which the system gives when it is written to, or in the background.

To write a gigabyte takes a second of a start, in which nothing else of the pool is needed.
"""

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23
_LEAST_PRIORITY = 19
_AT_ONCE = 2**21
"""Bytes; a huge page. Meanwhile nobody else in the process can map memory."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU in memory that nobody has written to; in huge pages where the system has them."""
    # numpy's, unlike torch's, leaves the zeroing to the system.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def populate(tensors: Sequence[Tensor]) -> None:
    """Have the system give all their memory, in a thread of its own; what is in it stays as it is."""
    threading.Thread(target=_populate, args=(list(tensors),), name="populate", daemon=True).start()


def _populate(tensors: list[Tensor]) -> None:
    # Linux's threads each have their own: steps come first.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for start in range(first, end, _AT_ONCE):
            # Linux before 5.14 refuses, and gives the memory when it is written to.
            if libc.madvise(start, min(_AT_ONCE, end - start), _MADV_POPULATE_WRITE):
                return
