"""What the terminal shows while the server runs: our own lines in short form, without the rest of what Ray prints.

Ray prints what its workers write to the driver's `sys.stdout` and `sys.stderr`, each line behind the worker's name; the
same lines are in Ray's log folder, so nothing is lost by leaving the controller's and the raylet's out.
"""

import atexit
import io
import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# `(ServeReplica:serve_app:EngineReplica pid=7188) INFO serve_app.serving.replica: warming up`
_WORKER_LINE = re.compile(r"\((?P<worker>[^()]*?)(?: pid=\d+)?(?:, ip=[^()]*)?\) (?P<text>.*)")
_OUR_RECORD = re.compile(r"(?P<level>[A-Z]+) serve_app[\w.]*: (?P<message>.*)")
# `serve run` says what it does in the form of log lines; the launcher says it in its own words.
_SERVE_RUN_LINE = re.compile(r"(INFO )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s.*")


_MAX_LINES = 1000
_MAX_WAIT_S = 1.0
"""For a line to be written, and at the end for all lines."""


def write_line(target: TextIO | None, line: str) -> None:
    """Write one line in one piece, and return when it is written.

    A target that is closed, full or not read stops nothing: after a second without progress, lines wait in memory, and
    beyond 1000 they are dropped. Characters that `target` cannot encode are escaped.
    """
    if target is None:
        return
    encoding = getattr(target, "encoding", None) or "utf-8"
    content = (line + "\n").encode(encoding, "backslashreplace")
    with suppress(OSError, ValueError):  # of a closed file
        try:
            descriptor = target.fileno()
        except io.UnsupportedOperation:  # in memory: it never blocks
            target.write(content.decode(encoding))
            target.flush()
        else:
            _writer(descriptor).write(content)


class _Writer:
    """Writes lines to a file descriptor, in order, in a thread of its own, as a full pipe blocks who writes to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_dropped = 0
        self._is_stuck = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="terminal", daemon=True).start()
        atexit.register(self._wait)

    def write(self, line: bytes) -> None:
        """Queue `line`, and wait until it is written unless the one before was waited for in vain."""
        with self._changed:
            if len(self._lines) >= _MAX_LINES:
                self._num_dropped += 1
                return
            if self._num_dropped:
                self._lines.append(f"serve-app: {self._num_dropped} lines were dropped here: not read\n".encode())
                self._num_dropped = 0
            self._lines.append(line)
            self._changed.notify_all()
            if not self._is_stuck:
                self._is_stuck = not self._wait()

    def _wait(self) -> bool:
        """Whether all lines are written within the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines, _MAX_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines[0]
            with suppress(OSError):
                self._write(line)
            with self._changed:
                self._lines.popleft()
                self._is_stuck = False
                self._changed.notify_all()

    def _write(self, content: bytes) -> None:
        """Past `sys.stdout`'s buffer: Python aborts at its end if a thread is blocked there."""
        while content:
            select.select([], [self._descriptor], [])  # which may be non-blocking
            content = content[os.write(self._descriptor, content) :]


_writer = cache(_Writer)


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
        """Do nothing: whole lines are written already, and an unfinished one stays."""

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
