"""Zeroed memory for a KV pool, which the system gives when it is written to, or beforehand while the model is idle.

To write a gigabyte takes a second of a start, in which nothing else of the pool is needed; on virtual machines whose
memory comes from their host as late, more than two.
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
"""Bytes; the vectors of a page that lies across two lines take two loads each."""
_AT_ONCE = 2**21
"""Bytes; a huge page. Meanwhile nobody else in the process can map memory."""
_IDLE_S = 0.05
"""So long after a step the next one is not expected."""
_MOST_WAITS = 20
"""Waits of `_IDLE_S` for an idle moment before a part comes anyway: whoever measures what memory is left, to share it
out, should find a busy engine's taken in the end."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU in memory that nobody has written to; in huge pages where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    # numpy's, unlike torch's, leaves the zeroing to the system, and begins anywhere in a cache line.
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


class Prefault:
    """Has the system give all memory of some tensors, in a thread of its own; what is in them stays as it is.

    A context manager around each use of the tensors: between two that follow each other closely next to nothing is
    given, as it would cost the second one more than the memory it needs.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._switches = 0
        """Ends and beginnings of uses: odd during one."""
        self._idle_at: int | None = 0
        """Their number when no use was seen last."""
        # Weak: a pool is dropped to make room for the next one.
        sizes = [(weakref.ref(tensor), tensor.nbytes) for tensor in tensors]
        self.thread = threading.Thread(target=self._run, args=(sizes,), name="prefault", daemon=True)
        self.thread.start()

    def __enter__(self) -> None:
        self._switches += 1

    def __exit__(self, *_: object) -> None:
        self._switches += 1

    def _run(self, tensors: Sequence[tuple["weakref.ref[Tensor]", int]]) -> None:
        # Linux's threads each have their own: whoever else works comes first.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        # Those parts first that are used first: the beginnings of all tensors.
        for offset in range(0, max(size for _, size in tensors), _AT_ONCE):
            for tensor, size in tensors:
                if offset >= size:
                    continue
                self._await_idleness()
                if not _populate(libc, tensor(), offset):
                    return

    def _await_idleness(self) -> None:
        """Until there has been no use for some time, but not for long."""
        for _ in range(_MOST_WAITS):
            if self._switches == self._idle_at:
                return
            self._idle_at = None if self._switches % 2 else self._switches
            time.sleep(_IDLE_S)


def _populate(libc: ctypes.CDLL, tensor: Tensor | None, offset: int) -> bool:
    """The part of `tensor` that begins at byte `offset`. False where it is gone, or the system can't.

    Linux before 5.14 can't, and gives the memory when it is written to.
    """
    if tensor is None:
        return False
    page = mmap.PAGESIZE
    first = -(-(tensor.data_ptr() + offset) // page) * page
    end = min(first + _AT_ONCE, (tensor.data_ptr() + tensor.nbytes) // page * page)
    return end <= first or libc.madvise(first, end - first, _MADV_POPULATE_WRITE) == 0
