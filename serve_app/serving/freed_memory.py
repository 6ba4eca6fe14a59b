"""Returns freed memory to the system, so that memory does not stay at the peak of large bodies."""

import ctypes

_M_MMAP_THRESHOLD = -3
"""The parameter's number in mallopt(3)."""
_THRESHOLD = 256 * 2**10


def return_freed_blocks() -> None:
    """Make glibc map every block of 256 KiB or more separately, and unmap it when it is freed.

    By default, glibc raises this threshold to the largest block freed, up to 32 MiB. Large bodies
    are then allocated between smaller blocks, and the holes they leave cannot be returned. No-op
    without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
