"""The ledger file of one day: JSON lines, appended whole, and read once to sum them.

Reading is linear and bounded, even for a damaged file: see `whole_lines`.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import orjson

from serve_app.errors import ConfigError
from serve_app.system.operator_files import open_regular
from serve_app.tenants.totals import Totals, parse_line, parse_object

MAX_BYTES = 4 * 2**30
"""Maximum size of a file: about 14 million requests. Reading it takes 30 s."""
MAX_LINE_BYTES = 64 * 2**10
"""Maximum length of a line. Lines of this ledger have about 300 bytes."""
_TAIL_BYTES = 64
_LOST, _UNTIL = "lost_file", "carried_bytes"
"""Fields of a mark, a line before carried sums: the inode of the lost file, and how many of its
bytes the sums cover."""


class DayFile:
    """The open file of one day, with the sums of its lines by key. Any process may append lines.

    All methods raise `OSError`, and `ConfigError` for a file that is not a ledger.
    """

    def __init__(self, folder: Path, day: date) -> None:
        """Open or create the file. `read_on` reads it."""
        self._path = ledger_file(folder, day)
        self._file = open_ledger(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._end = 0
        """End of the lines that were read, in bytes."""
        self._tail = b""
        """The last bytes that were read. They differ if the file was truncated and has grown again.
        """
        self.totals: dict[str, Totals] = defaultdict(Totals)
        self.is_dirty = False
        """Whether any written data may not be on the disk."""
        self._is_open_ended = False
        """Whether the last line may lack its newline."""
        try:
            self._end_last_line()
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor, for `fcntl.flock`."""
        return self._file

    def close(self) -> None:
        """Close the file. Call it once."""
        os.close(self._file)

    def is_lost(self) -> bool:
        """Whether the path now has another file or none, or this file was truncated."""
        ours = os.fstat(self._file)
        try:
            theirs = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) or self.is_cut()

    def is_cut(self) -> bool:
        """Whether the file no longer contains what was read."""
        return os.pread(self._file, len(self._tail), self._end - len(self._tail)) != self._tail

    def read_on(self) -> None:
        """Add the lines that any process has written since to the sums."""
        for block in whole_lines(self._path, self._file, self._end):
            self._end += len(block)
            self._tail = (self._tail + block[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            _add_lines(self.totals, block)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line and add it to the sums. A file that cannot be read is not written."""
        self.read_on()
        self._write(entry)
        self.read_on()

    def mark_carried(self, lost: "DayFile | None", time: str) -> int | None:
        """Write a mark: this file is about to contain the sums of the `lost` file's bytes so far.

        Returns how many of those bytes earlier marks cover; None without one.
        """
        if lost is None or os.path.sameopenfile(lost._file, self._file):
            return None
        inode, carried = os.fstat(lost._file).st_ino, list[int]()
        for block in whole_lines(self._path, self._file):
            marks = [parse_object(line) for line in block.split(b"\n") if _LOST.encode() in line]
            ends = [mark.get(_UNTIL) for mark in marks if mark.get(_LOST) == inode]
            carried += [end for end in ends if type(end) is int and 0 <= end <= lost._end]
        self._write({"time": time, _LOST: inode, _UNTIL: lost._end})
        return max(carried, default=None)

    def totals_from(self, start: int) -> dict[str, Totals]:
        """Return the sums by key of the lines from byte `start` to the end of what was read."""
        totals: dict[str, Totals] = defaultdict(Totals)
        for block in whole_lines(self._path, self._file, start, self._end):
            _add_lines(totals, block)
        return totals

    def take_to_sync(self) -> int | None:
        """Return a descriptor to sync and close; None without writes since the last call."""
        if not self.is_dirty:
            return None
        self.is_dirty = False
        return os.dup(self._file)

    def _end_last_line(self) -> None:
        """End a line without newline, as a power loss or an editor may leave.

        If its request is otherwise complete, it counts from the start.
        """
        size = os.fstat(self._file).st_size
        self._is_open_ended = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        if self._is_open_ended:
            with suppress(OSError):  # if the disk is full
                os.write(self._file, b"\n")
                self._is_open_ended, self.is_dirty = False, True

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = b"\n" * self._is_open_ended + orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._is_open_ended = True
        if os.write(self._file, line) < len(line):
            raise OSError("the disk is full")
        self._is_open_ended = False
        self.is_dirty = True


def ledger_file(folder: Path, day: date) -> Path:
    """Return the path of the file for requests that ended on `day` (UTC)."""
    return folder / f"usage-{day:%Y-%m-%d}.jsonl"


def open_ledger(path: Path, flags: int) -> int:
    """Open a ledger file and return its descriptor.

    Raises `OSError`, and `ConfigError` unless it is a regular file.
    """
    try:
        return open_regular(path, flags)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def whole_lines(path: Path, file: int, start: int = 0, end: int = MAX_BYTES) -> Iterator[bytes]:
    """Yield the complete lines of `file` from byte `start` to `end`, in blocks of several lines.

    Raises `OSError`, and `ConfigError` for a file larger than `MAX_BYTES`, or with a block of
    `MAX_LINE_BYTES` without a ledger's line: a line that is too long, a hole in a sparse file, or
    another kind of file.
    """
    while data := os.pread(file, min(MAX_LINE_BYTES, end - start), start):
        whole = data[: data.rfind(b"\n") + 1]
        if len(data) == MAX_LINE_BYTES and not any(parse_object(line) for line in whole.split(b"\n")):
            kib = MAX_LINE_BYTES // 2**10
            reason = f"no line of a ledger in {kib} KiB from byte {start} on; a line may have {kib} KiB"
            raise _no_ledger(path, file, reason)
        if not whole:
            return
        yield whole
        start += len(whole)
    if start >= MAX_BYTES:
        raise _no_ledger(path, file, f"a ledger's file may have {MAX_BYTES // 2**30} GiB")


def _no_ledger(path: Path, file: int, reason: str) -> ConfigError:
    return ConfigError(f"{path} ({os.fstat(file).st_size} bytes): {reason}; move it away")


def _add_lines(totals: dict[str, Totals], block: bytes) -> None:
    for line in block.split(b"\n"):
        if (entry := parse_line(line)) is not None:
            totals[entry["key"]].add(entry)
