"""Ends the server at once on a second Ctrl-C, even if the main thread is blocked.

Python runs signal handlers in the main thread between bytecode instructions, so never while the
thread waits inside Ray's library. But the interpreter writes a byte for each signal, which a
separate thread reads.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ONE_PRESS_S = 1.0
"""A terminal, or a program in between, may deliver one Ctrl-C twice."""


@contextmanager
def at_once_on_second_interrupt(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` in a thread at a second SIGINT, one second or more after the first.

    Use it in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_count, args=(reader, end), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def kill_descendants() -> None:
    """SIGKILL every descendant of this process, where /proc exists.

    Elsewhere they end by themselves after their parent.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below = [os.getpid()]
    for pid in below:
        below += children.get(pid, [])
    for pid in below[1:]:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _count(reader: int, end: Callable[[], None]) -> None:
    first: float | None = None
    while numbers := os.read(reader, 64):
        if signal.SIGINT not in numbers:
            continue
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first >= _ONE_PRESS_S:
            end()
    os.close(reader)
