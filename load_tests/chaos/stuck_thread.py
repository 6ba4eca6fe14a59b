"""Stops one thread of another process, like a kernel that never returns.

    python -m load_tests.chaos.stuck_thread THREAD_ID

Uses ptrace (Linux; as root or with the right to trace), since SIGSTOP stops all threads. Prints
"stopped" and waits until the thread is gone, because a stopped thread continues when its tracer
ends.
"""

import ctypes
import os
import sys

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_ALL_KINDS_OF_CHILDREN = 0x40000000  # __WALL: threads are children to their tracer


def main(thread_id: int) -> None:
    """Stop the thread. Raises `OSError` if it may not be traced."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    for request in (_SEIZE, _INTERRUPT):
        if libc.ptrace(request, thread_id, None, None) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(thread_id, _ALL_KINDS_OF_CHILDREN)
    print("stopped", flush=True)
    os.waitpid(thread_id, _ALL_KINDS_OF_CHILDREN)


if __name__ == "__main__":
    main(int(sys.argv[1]))
