"""Detects a HAProxy that is frozen (SIGSTOP).

A frozen HAProxy does not answer on its socket, uses no CPU time, and is in state "stopped". During
a reload there are two processes and either may be the one that should answer, so all children are
checked.
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
    """Checks this process's children. Blocking; not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._state: dict[int, int] = {}
        self._since = 0.0
        self.unanswered = 0
        """Consecutive requests without an answer."""

    def look(self, path: Path) -> list[int]:
        """Return the stopped children if HAProxy has not answered or worked for 2 s.

        Not answered: on socket `path`. Not worked: no child used CPU time, as a busy process may
        answer late. Takes up to 0.5 s.
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
    """Blocking, so that an answer counts even if this process was late to read it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"show info\n")
            return bool(connection.recv(1))
        except (TimeoutError, BlockingIOError):  # BlockingIOError: too many connections wait
            return False
        except OSError:  # the process has ended: nothing listens on its socket
            return True


def _children() -> dict[int, tuple[str, int]]:
    """Return state and CPU ticks used of this process's children, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[1]) == os.getpid():
            found[int(folder.name)] = fields[0], int(fields[11]) + int(fields[12])
    return found
