"""Stops one thread of another process, as a kernel that never returns would: everything else in it goes on.

    python -m load_tests.chaos.stuck_thread THREAD_ID

By ptrace (Linux; root, or the right to trace): SIGSTOP could only stop all threads. Says "stopped", and stays until
the thread is gone, since whom a tracer leaves goes on.
"""

import ctypes
import os
import sys

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_ALL_KINDS_OF_CHILDREN = 0x40000000  # __WALL: threads are children to their tracer


def main(thread_id: int) -> None:
    """Raises `OSError` if the thread may not be traced."""
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
