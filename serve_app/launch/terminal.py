"""What the terminal shows while the server runs: our own lines in short form, without the rest of what Ray prints.

Ray prints what its workers write to the driver's `sys.stdout` and `sys.stderr`, each line behind the worker's name; the
same lines are in Ray's log folder, so nothing is lost by leaving the controller's and the raylet's out.
"""

import io
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# `(ServeReplica:serve_app:EngineReplica pid=7188) INFO serve_app.serving.replica: warming up`
_WORKER_LINE = re.compile(r"\((?P<worker>[^()]*?)(?: pid=\d+)?(?:, ip=[^()]*)?\) (?P<text>.*)")
_OUR_RECORD = re.compile(r"(?P<level>[A-Z]+) serve_app[\w.]*: (?P<message>.*)")
# `serve run` says what it does in the form of log lines; the launcher says it in its own words.
_SERVE_RUN_LINE = re.compile(r"(INFO )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s.*")


def write_line(target: TextIO | None, line: str) -> None:
    """In one piece, so that no other thread's line comes in between. A terminal that is gone, a pipe that nobody reads
    or a full disk ends no server, and a character that `target` does not have is escaped."""
    if target is None:
        return
    encoding = getattr(target, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):  # of a closed file
        target.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        target.flush()


class Terminal(io.TextIOBase):
    """Stands in for `sys.stdout` or `sys.stderr`: passes on to `target` what is meant for people."""

    def __init__(self, target: TextIO, say: Callable[[str], None]) -> None:
        """`say` prints one of our workers' lines."""
        self._target = target
        self._say = say
        self._pending = ""

    def write(self, text: str) -> int:
        """Take `text`; whole lines are judged, the rest waits."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._line(line)
        return len(text)

    def flush(self) -> None:
        """Flush the target; an unfinished line stays."""
        with suppress(OSError, ValueError):
            self._target.flush()

    def isatty(self) -> bool:
        """No colours: the lines are taken apart."""
        return False

    def _line(self, line: str) -> None:
        plain = _COLOUR.sub("", line)
        worker = _WORKER_LINE.fullmatch(plain)
        if worker is None:
            if not _SERVE_RUN_LINE.fullmatch(plain):
                write_line(self._target, line)
            return
        if worker["text"].startswith('{"time":'):  # a request's line, for programs: as it is
            write_line(self._target, worker["text"])
            return
        record = _OUR_RECORD.fullmatch(worker["text"])
        if record is not None:
            name = worker["worker"].rpartition(":")[2]
            level = "" if record["level"] == "INFO" else f"{record['level']}: "
            self._say(f"{name}: {level}{record['message']}")
