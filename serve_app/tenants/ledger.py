"""Who has used what: one JSON line per request that was computed, in a file per UTC day. Never text.

A line is in the file before its client is told the end, so no ended request is lost with the process; `sync` puts it
on the disk. Several processes may write the same files: lines are appended whole.

Today's sums outlive the file: what it lost or could not take is written again, as one line per key with the sums.
"""

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson

from serve_app.errors import ConfigError

logger = logging.getLogger(__name__)

_REMINDER_S = 30.0
_TAIL_BYTES = 64
_CARRIED = {"model": "", "revision": "", "request_id": "", "endpoint": "", "outcome": "carried", "seconds": 0.0}
"""Of a line with the sums of requests whose own lines were lost, or could not be written."""
_LOST, _UNTIL = "lost_file", "carried_bytes"
"""Of a line before those: up to where in a lost file, by its inode, they go."""
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Spent:
    """One request that was computed, all or in part: what was used for whom.

    key: the API key's name, empty for strangers. revision: changes whenever a seed may give another answer.
    prompt_tokens: of prompts that were computed; cached_tokens of them were found in the prefix cache.
    reasoning_tokens: of output_tokens. seconds: from its arrival to its end.
    """

    key: str
    model: str
    revision: str
    request_id: str
    endpoint: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    seconds: float


@dataclass(slots=True)
class Totals:
    """Sums of requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def tokens(self) -> int:
        """What counts against limits."""
        return self.prompt_tokens + self.output_tokens

    def add(self, line: dict[str, Any]) -> None:
        """Count one line of a ledger, or a `Spent` as a dict. A line with `requests` is the sum of so many."""
        self.requests += line.get("requests", 1)
        self.prompt_tokens += line["prompt_tokens"]
        self.cached_tokens += line["cached_tokens"]
        self.output_tokens += line["output_tokens"]
        self.reasoning_tokens += line.get("reasoning_tokens", 0)  # older lines have none

    def without(self, other: "Totals") -> "Totals":
        """What these have beyond `other`; 0 where that has more."""
        return Totals(*(max(0, getattr(self, kind.name) - getattr(other, kind.name)) for kind in fields(Totals)))

    def plus(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals(*(getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(Totals)))


class Ledger:
    """The ledger in one folder, and today's sums by key, of all processes that write there. For one thread."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        must_open: bool = True,
    ) -> None:
        """`clock`: Unix time in seconds.

        Raises `ConfigError` if the folder cannot be written; unless `must_open`, it is logged and tried again.
        """
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._day: date | None = None
        self._file = -1
        self._read = 0
        self._rest = b""
        self._tail = b""
        """The last bytes that were read, by which a file that was truncated and has grown again is told."""
        self._totals: dict[str, Totals] = defaultdict(Totals)
        """What the lines that were read say."""
        self._missing: dict[str, Totals] = defaultdict(Totals)
        """What was used and is in no line."""
        self._dirty = False
        self._cut = False
        """Whether the last line may have no end."""
        self._next_report: dict[str, float] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._turn_to(self._today())
        except (OSError, ValueError) as error:
            if must_open:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"setting `ingress.ledger_folder`: {folder}: {reason}") from None
            self.look()

    @property
    def is_open(self) -> bool:
        """Whether there is a file for today's lines; without one, only memory has them."""
        return self._file >= 0

    def close(self) -> None:
        """Let go of the file, as of one that was only opened to see whether that is possible."""
        if self._day is not None:
            self._begin(-1, self._day)

    def today(self, key: str) -> Totals:
        """What `key` has used since midnight, UTC. Not to be changed."""
        self._follow()
        return self._totals[key].plus(self._missing[key]) if key in self._missing else self._totals[key]

    def write(self, spent: Spent) -> None:
        """Add a line. Where that fails, it is logged, and today's sums count it all the same."""
        now = self._clock()
        entry = {"time": _time(now), **asdict(spent), "seconds": round(spent.seconds, 4)}
        try:
            self._turn_to(datetime.fromtimestamp(now, UTC).date())
            if self._is_cut():
                self.look()
                if self._is_cut():
                    raise OSError("today's file was truncated")
            self._append(entry)
        except OSError as error:
            self._missing[spent.key].add(entry)
            self._report("the ledger cannot be written; today's sums are kept in memory", error)

    def look(self) -> None:
        """Notice that today's file was removed, moved, truncated or locked away, and write what it lacks.

        To be called every moment; fast unless something has happened. Errors are logged and tried again.
        """
        try:
            self._follow()
            path = ledger_file(self._folder, self._day or self._today())
            if self._is_lost(path):
                self._open_again(path)
            self._write_missing()
            os.close(os.open(path, os.O_RDWR))  # as the next start does
        except BlockingIOError:
            pass  # another process writes what the file lacks
        except OSError as error:
            self._report("the ledger's file of today cannot be used; today's sums are kept in memory", error)

    def sync(self) -> None:
        """Put what was written on the disk. Blocks; may run in another thread. Errors are logged and tried again."""
        if self._dirty:
            self._dirty = False
            try:
                os.fsync(self._file)
            except OSError as error:
                self._dirty = True
                self._report("the ledger cannot be put on the disk", error)

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Raises `OSError`."""
        line = b"\n" * self._cut + orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._cut = True
        if os.write(self._file, line) < len(line):
            raise OSError("the disk is full")
        self._cut = False
        self._dirty = True
        self._read_on()

    def _turn_to(self, day: date) -> None:
        """Let the file be that of `day`. Raises `OSError`; there is no file then, until `look` has opened it."""
        if day == self._day:
            return
        try:
            self._write_missing()
        except OSError as error:
            self._report(f"requests of {self._day} are missing from the ledger", error)
        self._missing.clear()
        self._begin(-1, day)
        self._begin(self._open(day), day)

    def _open(self, day: date) -> int:
        return os.open(ledger_file(self._folder, day), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def _begin(self, file: int, day: date) -> None:
        """With a file that was just opened, or without one (-1); the one before is closed."""
        self.sync()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._day, self._dirty = file, day, False
        self._read, self._rest, self._tail = 0, b"", b""
        self._totals.clear()
        self._cut = file >= 0 and _is_cut_short(file)

    def _is_lost(self, path: Path) -> bool:
        """Whether the open file is not, or no longer as a whole, the one that the next start would read."""
        if self._file < 0:
            return True
        ours = os.fstat(self._file)
        try:
            theirs = os.stat(path)
        except FileNotFoundError:
            return True
        return (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) or self._is_cut()

    def _is_cut(self) -> bool:
        """Whether the file no longer holds what was read. Raises `OSError`."""
        return os.pread(self._file, len(self._tail), self._read - len(self._tail)) != self._tail

    def _open_again(self, path: Path) -> None:
        """Take the file that has this name now, or a new one, and write what it lacks. Raises `OSError`.

        Other processes may find the same loss, before or after: the first writes all sums, and up to
        where in the lost file they go; the next ones what was written to that since. Without such a
        mark, as in a file that an operator has put there, the difference of the sums is written.
        """
        assert self._day is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._open(self._day)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or unlocked
            carried = self._mark_carried(file)
        except OSError:
            os.close(file)
            raise
        try:
            if self._file >= 0:
                logger.error("today's ledger %s was removed, replaced or truncated: its sums are written again", path)
            known = dict(self._totals) if carried is None else _sums(self._file, carried, self._read)
            self._begin(file, self._day)
            self._read_on()
            for key, total in known.items():
                lack = total.without(self._totals[key]) if carried is None else total
                self._missing[key] = self._missing[key].plus(lack)
            self._write_missing()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _mark_carried(self, file: int) -> int | None:
        """Say in `file` how much of the lost one it is about to have. Returns how much it had before; None for none.

        Raises `OSError`.
        """
        if self._file < 0 or os.path.sameopenfile(self._file, file):
            return None
        self._read_on()
        lost, size = os.fstat(self._file).st_ino, os.fstat(file).st_size
        marks = [_entry(line) for line in os.pread(file, size, 0).split(b"\n") if _LOST.encode() in line]
        mark = {"time": _time(self._clock()), _LOST: lost, _UNTIL: self._read - len(self._rest)}
        line = b"\n" * _is_cut_short(file) + orjson.dumps(mark, option=orjson.OPT_APPEND_NEWLINE)
        if os.write(file, line) < len(line):
            raise OSError("the disk is full")
        return max((mark[_UNTIL] for mark in marks if mark.get(_LOST) == lost), default=None)

    def _write_missing(self) -> None:
        """A line for each key of what is in no line. Raises `OSError`."""
        for key, total in [*self._missing.items()]:
            if total != Totals():
                self._append({"time": _time(self._clock()), **_CARRIED, "key": key, **asdict(total)})
            del self._missing[key]

    def _follow(self) -> None:
        """Count what has been written since, by whomever."""
        try:
            self._turn_to(self._today())
            self._read_on()
        except OSError as error:
            self._report("the ledger cannot be read", error)

    def _read_on(self) -> None:
        """Raises `OSError`."""
        while self._file >= 0 and (data := os.pread(self._file, 2**20, self._read)):
            self._read += len(data)
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if (entry := _parse(line)) is not None:
                    self._totals[entry["key"]].add(entry)

    def _report(self, what: str, error: OSError) -> None:
        """Once, and again every 30 s while it lasts."""
        now = self._monotonic()
        if now >= self._next_report.get(what, 0.0):
            self._next_report[what] = now + _REMINDER_S
            logger.error("%s: %s", what, error)


def ledger_file(folder: Path, day: date) -> Path:
    """Where the requests that ended on `day`, UTC, are."""
    return folder / f"usage-{day:%Y-%m-%d}.jsonl"


def read_ledger(folder: Path, since: date, until: date) -> Iterator[tuple[date, dict[str, Any]]]:
    """The requests that ended on the days from `since` to `until`, both included. Raises `ConfigError`."""
    for path in sorted(folder.glob("usage-*.jsonl")):
        try:
            day = date.fromisoformat(path.stem.removeprefix("usage-"))
        except ValueError:
            continue
        if not since <= day <= until:
            continue
        try:
            with path.open("rb") as file:
                for line in file:
                    if (entry := _parse(line)) is not None:
                        yield day, entry
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def _is_cut_short(file: int) -> bool:
    """Whether its last line has no end, as after a loss of power. Raises `OSError`."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _sums(file: int, start: int, end: int) -> dict[str, Totals]:
    """Of the lines from byte `start` to byte `end`, by key. Raises `OSError`."""
    sums: dict[str, Totals] = defaultdict(Totals)
    for line in os.pread(file, end - start, start).split(b"\n"):
        if (entry := _parse(line)) is not None:
            sums[entry["key"]].add(entry)
    return sums


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line that was written whole; None for what is left of another, or was never one of ours."""
    entry = _entry(line)
    if not isinstance(entry.get("key"), str):
        return None
    counts = [entry.get("requests", 1), entry.get("reasoning_tokens", 0), *(entry.get(name) for name in _COUNTS)]
    return entry if all(type(count) is int and count >= 0 for count in counts) else None


def _entry(line: bytes) -> dict[str, Any]:
    """A line's JSON object; empty where it has none."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
