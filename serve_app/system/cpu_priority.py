"""Which threads may interrupt others on cores that they share. Only on Linux; elsewhere nothing happens.

All threads of a step on a CPU wait for one that was interrupted. Ray's processes and ours wake up more than a thousand
times a second even when idle, each time for some microseconds that can wait.
"""

import os
import sys
from contextlib import suppress


def yield_cpu() -> None:
    """This thread, and all threads and processes that it starts, wait for a core until its thread pauses.

    They get as much of the cores as before, only later by some milliseconds at most.
    """
    _set_policy("SCHED_BATCH")


def share_cpu_normally() -> None:
    """Restore the default policy for this thread and what it starts."""
    _set_policy("SCHED_OTHER")


def _set_policy(name: str) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # where a sandbox forbids it, it is only a bit slower
            os.sched_setscheduler(0, getattr(os, name), os.sched_param(0))
