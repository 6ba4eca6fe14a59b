"""Whether HAProxy is frozen (SIGSTOP): its socket does not answer, it uses no processor, and the kernel has stopped it.

Of a reload there are two processes, of which either may be the one that should answer: all children are looked at.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

_ANSWER_S = 0.5
_FROZEN_S = 2.0
_UNANSWERED = 3
_STOPPED = ("T", "t")


class FrozenCheck:
    """Looks at this process's children. Blocks; for one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._state: dict[int, int] = {}
        self._since = 0.0
        self.unanswered = 0
        """Requests without an answer until now, in a row."""

    def look(self, path: Path) -> list[int]:
        """The children that are stopped, if nothing has answered on HAProxy's socket `path` for 2 s, or worked.

        A busy process may answer late, but uses the processor meanwhile. Takes up to 0.5 s.
        """
        now, children = self._clock(), _children()
        ticks = {pid: used for pid, (_, used) in children.items()}
        if _answers(path):
            self.unanswered = 0
            return []
        if self.unanswered == 0 or ticks != self._state:
            self._state, self._since, self.unanswered = ticks, now, 0
        self.unanswered += 1
        if self.unanswered < _UNANSWERED or self._clock() - self._since < _FROZEN_S:
            return []
        return [pid for pid, (state, _) in children.items() if state in _STOPPED]


def _answers(path: Path) -> bool:
    """Blocking, so that an answer that is there counts, however late this process gets to see it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"show info\n")
            return bool(connection.recv(1))
        except (TimeoutError, BlockingIOError):  # the latter if too many wait already
            return False
        except OSError:  # its socket is no longer listened to: it has ended
            return True


def _children() -> dict[int, tuple[str, int]]:
    """State and used ticks of the processor of this process's children, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid():
            found[int(folder.name)] = fields[0], int(fields[11]) + int(fields[12])
    return found
