"""Zeroed memory for a KV pool. The system allocates it on the first write, or earlier while idle.

Writing a gigabyte at start would take 1 s, when nothing else needs the pool's memory yet. It would
take more than 2 s on virtual machines whose host allocates their memory lazily too.
"""

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23
_LEAST_PRIORITY = 19
_CACHE_LINE = 64
"""Bytes. Vectors that straddle two cache lines take two loads each."""
_AT_ONCE = 2**21
"""Bytes, one huge page. No other thread of the process can map memory while it is populated."""
_IDLE_S = 0.05
"""Seconds after a step until the model counts as idle."""
_MOST_WAITS = 20
"""Waits of `_IDLE_S` for an idle moment before the next part is populated anyway. A busy engine's
memory is thus allocated in the end, so that measurements of free memory count it.
"""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a zeroed CPU tensor whose memory is not written yet; in huge pages where the system
    has them.
    """
    size = math.prod(shape) * dtype.itemsize
    # numpy, unlike torch, leaves the zeroing to the system, but aligns to no cache line.
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


class Prefault:
    """Populates all memory of some tensors in its own thread. Their contents do not change.

    Use it as a context manager around each use of the tensors. Almost nothing is populated between
    two uses in quick succession: that would delay the second use by more than allocating the memory
    it needs.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._switches = 0
        """Number of starts and ends of uses: odd during a use."""
        self._idle_at: int | None = 0
        """Value of `_switches` when the tensors were last seen unused."""
        # Weak references: a pool is dropped to make room for the next.
        sizes = [(weakref.ref(tensor), tensor.nbytes) for tensor in tensors]
        self.thread = threading.Thread(target=self._run, args=(sizes,), name="prefault", daemon=True)
        self.thread.start()

    def __enter__(self) -> None:
        self._switches += 1

    def __exit__(self, *_: object) -> None:
        self._switches += 1

    def _run(self, tensors: Sequence[tuple["weakref.ref[Tensor]", int]]) -> None:
        # On Linux each thread has its own priority: all other work comes first.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # The beginnings of all tensors are used first.
        for offset in range(0, max(size for _, size in tensors), _AT_ONCE):
            for tensor, size in tensors:
                if offset >= size:
                    continue
                self._await_idleness()
                if not _populate(libc, tensor(), offset):
                    return

    def _await_idleness(self) -> None:
        """Wait until the tensors have been unused for a while, for at most `_MOST_WAITS` waits."""
        for _ in range(_MOST_WAITS):
            if self._switches == self._idle_at:
                return
            self._idle_at = None if self._switches % 2 else self._switches
            time.sleep(_IDLE_S)


def _populate(libc: ctypes.CDLL, tensor: Tensor | None, offset: int) -> bool:
    """Populate the part of `tensor` at byte `offset`. Return False if the tensor is gone or the
    system cannot.

    Linux before 5.14 cannot; it allocates the memory on the first write.
    """
    if tensor is None:
        return False
    page = mmap.PAGESIZE
    first = -(-(tensor.data_ptr() + offset) // page) * page
    end = min(first + _AT_ONCE, (tensor.data_ptr() + tensor.nbytes) // page * page)
    return end <= first or libc.madvise(first, end - first, _MADV_POPULATE_WRITE) == 0
