"""Whether HAProxy is frozen (SIGSTOP, a cgroup's freezer): its socket does not answer, and it uses no processor."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

_ANSWER_S = 0.5
_FROZEN_S = 2.0
_UNANSWERED = 3


class FrozenCheck:
    """Looks at one process, or at the one that took its place. Blocks; for one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._state: tuple[int, int | None] | None = None
        self._since = 0.0
        self.unanswered = 0
        """Requests without an answer until now, in a row."""

    def look(self, pid: int, path: Path) -> bool:
        """Whether the process `pid` has answered nothing on HAProxy's socket `path` for 2 s, and done nothing else.

        A busy process may answer late, but uses the processor meanwhile. Takes up to 0.5 s.
        """
        now, state = self._clock(), (pid, _processor_ticks(pid))
        if _answers(path):
            self.unanswered = 0
            return False
        if self.unanswered == 0 or state != self._state:
            self._state, self._since, self.unanswered = state, now, 0
        self.unanswered += 1
        return self.unanswered >= _UNANSWERED and self._clock() - self._since >= _FROZEN_S


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


def _processor_ticks(pid: int) -> int | None:
    """What the process has used; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
