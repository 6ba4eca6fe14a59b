"""Filters terminal output while the server runs: our own lines in short form, little of Ray's.

Ray prints its workers' output to the driver's `sys.stdout` and `sys.stderr`, each line after the
worker's name. Ray's log folder has the same lines, so dropping those of the controller and the
raylet loses nothing.
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
# `serve run` prints its progress as log lines; the launcher prints its own messages instead.
_SERVE_RUN_LINE = re.compile(r"(INFO )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s.*")


_MAX_LINES = 1000
_MAX_WAIT_S = 1.0
"""Maximum wait for a line to be written, and at exit for all lines."""


def write_line(target: TextIO | None, line: str) -> None:
    """Write a line in one piece and wait until it is written.

    A closed, full or unread target blocks nothing: after a second without progress, lines wait in
    memory, and beyond 1000 they are dropped. Characters that `target` cannot encode are escaped.
    """
    if target is None:
        return
    encoding = getattr(target, "encoding", None) or "utf-8"
    content = (line + "\n").encode(encoding, "backslashreplace")
    with suppress(OSError, ValueError):  # the file is closed
        try:
            descriptor = target.fileno()
        except io.UnsupportedOperation:  # an in-memory file never blocks
            target.write(content.decode(encoding))
            target.flush()
        else:
            _writer(descriptor).write(content)


class _Writer:
    """Writes lines to a file descriptor in order, in a thread, as a full pipe blocks writers."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._num_dropped = 0
        self._is_stuck = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="terminal", daemon=True).start()
        atexit.register(self._wait)

    def write(self, line: bytes) -> None:
        """Queue `line`. Wait until it is written, unless the wait for an earlier line timed out."""
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
        """Write without `sys.stdout`'s buffer: Python aborts at exit if a thread blocks in it."""
        while content:
            select.select([], [self._descriptor], [])  # it may be non-blocking
            content = content[os.write(self._descriptor, content) :]


_writer = cache(_Writer)


class Terminal(io.TextIOBase):
    """Replaces `sys.stdout` or `sys.stderr`, and passes the lines meant for users to `target`."""

    def __init__(self, target: TextIO, say: Callable[[str], None]) -> None:
        """`say` prints a line of our workers."""
        self._target = target
        self._say = say
        self._pending = ""

    def write(self, text: str) -> int:
        """Filter the complete lines of `text`; keep the rest for the next call."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._line(line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are already written, and an incomplete one is kept."""

    def isatty(self) -> bool:
        """Return False, to get lines without colours, which are parsed here."""
        return False

    def _line(self, line: str) -> None:
        plain = _COLOUR.sub("", line)
        worker = _WORKER_LINE.fullmatch(plain)
        if worker is None:
            if not _SERVE_RUN_LINE.fullmatch(plain):
                write_line(self._target, line)
            return
        if worker["text"].startswith('{"time":'):  # a request's JSON line, for programs
            write_line(self._target, worker["text"])
            return
        record = _OUR_RECORD.fullmatch(worker["text"])
        if record is not None:
            name = worker["worker"].rpartition(":")[2]
            level = "" if record["level"] == "INFO" else f"{record['level']}: "
            self._say(f"{name}: {level}{record['message']}")
