"""CPU scheduling policies of threads. Only on Linux; a no-op elsewhere.

When a thread of a step is interrupted, all other threads of the step wait for it. Ray's processes
and ours wake up more than a thousand times a second even when idle, each time for some microseconds
that can wait.
"""

import os
import sys
from contextlib import suppress


def yield_cpu() -> None:
    """Prevent this thread, and everything that it starts, from interrupting running threads.

    They get the same share of CPU time, but start later, by some milliseconds at most.
    """
    _set_policy("SCHED_BATCH")


def share_cpu_normally() -> None:
    """Restore the default policy for this thread and everything that it starts."""
    _set_policy("SCHED_OTHER")


def _set_policy(name: str) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # if a sandbox forbids it, the server is only slightly slower
            os.sched_setscheduler(0, getattr(os, name), os.sched_param(0))
