"""Lets freed memory go back to the system: what one hour's large bodies took, the next hour need not keep."""

import ctypes

_M_MMAP_THRESHOLD = -3
"""mallopt(3)."""
_THRESHOLD = 256 * 2**10


def return_freed_blocks() -> None:
    """Have glibc map every block of 256 KiB and more by itself, and unmap it when it is freed.

    Left alone it raises that size to the largest block that was freed, up to 32 MiB; then bodies lie between smaller
    blocks, and a hole cannot be given back. Nothing happens where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
