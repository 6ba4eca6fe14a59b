"""The usage ledger: one JSON line per computed request, in one file per UTC day. Contains no text.

A line is written before the client receives the end, so a crash of the process loses no finished
request; `sync` writes it to the disk. Several processes may append to the same files: lines are
written whole.
Today's sums are also in memory. If the file is lost or cannot be written, they are written again
later, as one line per key.
"""

import fcntl
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from serve_app.errors import ConfigError
from serve_app.tenants.day_file import DayFile, ledger_file, open_ledger, whole_lines
from serve_app.tenants.totals import Totals, parse_line

logger = logging.getLogger(__name__)

_REMINDER_S = 30.0
_PATIENCE_S = 0.02
"""How long the event loop waits for a `look` in another thread, which normally takes 0.1 ms."""
_CARRIED = {"model": "", "revision": "", "request_id": "", "endpoint": "", "outcome": "carried", "seconds": 0.0}
"""Fields of a line with the sums of requests whose own lines were lost or could not be written."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Usage of one request that was computed, fully or partly.

    key: the API key's name, empty without one. revision: changes whenever a seed may give a
    different answer.
    prompt_tokens: of computed prompts. cached_tokens: how many of them were in the prefix cache.
    reasoning_tokens: how many of output_tokens. seconds: from arrival to end.
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


class Ledger:
    """The ledger in one folder, with today's sums by key of all processes that write there.

    Use it on an event loop, with `look` and `sync` in another thread. If these block, for example
    on a file system that does not answer, the loop continues with the last known sums and queues
    its lines.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        must_open: bool = True,
    ) -> None:
        """clock: Unix time in seconds.

        Raises `ConfigError` if the folder cannot be written or today's file is not a ledger.
        Without `must_open`, this is logged and retried.
        """
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._day: date | None = None
        self._file: DayFile | None = None
        self._missing: dict[str, Totals] = defaultdict(Totals)
        """Usage by key that is in no line yet."""
        self._next_report: dict[str, float] = {}
        self.error: str | None = None
        """Why today's file could not be used at the last `look`; None if it could."""
        self._files = threading.Lock()
        """Lock for all attributes above."""
        self._known: Mapping[str, Totals] = {}
        """The sums at the start of the latest `look`, without `_waiting`."""
        self._waiting: list[tuple[float, Spent]] = []
        """Requests that ended while a `look` blocked, with their end times. Used only by the event
        loop."""
        self._is_held_up = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._turn_to(self._today())
            if self._file is not None:
                self._file.read_on()
        except (OSError, ValueError, ConfigError) as error:
            self.close()
            if must_open:
                reason = f"{folder}: {getattr(error, 'strerror', None) or error}"
                if isinstance(error, ConfigError):  # its message names the file
                    reason = str(error)
                raise ConfigError(f"setting `ingress.ledger_folder`: {reason}") from None
            self.look()

    @property
    def is_open(self) -> bool:
        """Whether today's file is open. Otherwise lines are kept only in memory."""
        return self._file is not None

    def close(self) -> None:
        """Close the file."""
        self._use(None)

    def today(self, key: str) -> Totals:
        """Return the usage of `key` since midnight UTC."""
        with self._at_once() as free:
            if free:
                self._follow()
                return self._total(key)
            total = self._known.get(key, Totals()).plus(Totals())
            for _, spent in self._waiting:
                if spent.key == key:
                    total.add(asdict(spent))
            return total

    def write(self, spent: Spent) -> None:
        """Add a line. A failure is logged, and today's sums count the request anyway."""
        self._waiting.append((self._clock(), spent))
        self.catch_up()

    def catch_up(self) -> None:
        """Write the queued lines, unless a `look` blocks. Call it after each `look`."""
        with self._at_once():
            pass

    def look(self) -> None:
        """Detect the loss of today's file, and write what it lacks.

        The file is lost if it was removed, moved, truncated or made inaccessible. Call this
        frequently, in any thread; it is fast unless something has happened. Errors are logged and
        retried.
        """
        with self._files:
            self._known = {key: self._total(key) for key in {*self._missing, *self._read_totals()}}
            try:
                self._look()
                self.error = None
            except BlockingIOError:
                pass  # another process is writing what the file lacks
            except (OSError, ConfigError) as error:
                self.error = str(error)
                self._report("today's ledger file cannot be used; today's sums are kept in memory", error)

    def sync(self) -> None:
        """Sync written lines to the disk.

        Blocks; call it in any thread. Errors are logged and retried.
        """
        with self._files:
            file = self._file
            copy = None if file is None else file.take_to_sync()
        if file is not None and copy is not None:
            self._sync(file, copy)

    @contextmanager
    def _at_once(self) -> Iterator[bool]:
        """Lock the files if no `look` blocks, and write queued lines.

        Yields whether the lock is held.
        """
        free = self._files.acquire(timeout=0 if self._is_held_up else _PATIENCE_S)
        self._is_held_up = not free
        try:
            if free:
                while self._waiting:
                    self._write(*self._waiting.pop(0))
            yield free
        finally:
            if free:
                self._files.release()

    def _read_totals(self) -> Mapping[str, Totals]:
        return {} if self._file is None else self._file.totals

    def _total(self, key: str) -> Totals:
        return self._read_totals().get(key, Totals()).plus(self._missing.get(key, Totals()))

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def _write(self, now: float, spent: Spent) -> None:
        entry = {"time": _time(now), **asdict(spent), "seconds": round(spent.seconds, 4)}
        try:
            self._turn_to(datetime.fromtimestamp(now, UTC).date())
            if self._file is not None and self._file.is_cut():
                self._look()
                if self._file.is_cut():
                    raise OSError("today's file was truncated")
            self._append(entry)
        except (OSError, ConfigError) as error:
            self._missing[spent.key].add(entry)
            self._report("the ledger cannot be written; today's sums are kept in memory", error)

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Append a line. Raises `OSError` and `ConfigError`."""
        if self._file is None:
            raise OSError("today's file is not open")
        self._file.append(entry)

    def _look(self) -> None:
        """Check today's file and write what it lacks. Raises `OSError` and `ConfigError`."""
        self._turn_to(self._today())
        if self._file is None or self._file.is_lost():
            self._open_again()
        else:
            self._file.read_on()
        self._write_missing()
        # Raise what the next start would raise.
        os.close(open_ledger(ledger_file(self._folder, self._today()), os.O_RDWR))

    def _turn_to(self, day: date) -> None:
        """Switch to the file of `day`. Raises as `DayFile` does; then `look` must open it."""
        if day == self._day:
            return
        try:
            self._write_missing()
        except (OSError, ConfigError) as error:
            self._report(f"requests of {self._day} are missing from the ledger", error)
        self._missing.clear()
        self._use(None)
        self._day = day
        self._use(DayFile(self._folder, day))

    def _use(self, file: DayFile | None) -> None:
        """Switch to `file`, and close the previous one."""
        old, self._file = self._file, file
        if old is None:
            return
        try:
            copy = old.take_to_sync()
            if copy is not None:
                self._sync(old, copy)
        finally:
            old.close()

    def _open_again(self) -> None:
        """Open the file that has this path now, or create it, and write what it lacks.

        Other processes may detect the same loss. The first writes all sums and a mark, which says
        how much of the lost file they cover. The others write only what that file got later.
        Without a mark, as in a file that an operator put there, the difference of the sums is
        written. Raises as `DayFile` does.
        """
        assert self._day is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        lost, file = self._file, DayFile(self._folder, self._day)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until closed or unlocked
            with suppress(OSError, ConfigError):  # then use what was read
                if lost is not None and not lost.is_cut():
                    lost.read_on()
            carried = file.mark_carried(lost, _time(self._clock()))
            known = self._read_totals() if lost is None or carried is None else lost.totals_from(carried)
            file.read_on()
        except (OSError, ConfigError):
            file.close()
            raise
        try:
            if lost is not None:
                what = "was removed, replaced or truncated: its sums are written again"
                logger.error("today's ledger %s %s", ledger_file(self._folder, self._day), what)
            for key, total in known.items():
                lack = total.without(file.totals.get(key, Totals())) if carried is None else total
                self._missing[key] = self._missing[key].plus(lack)
            self._use(file)
            self._write_missing()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _write_missing(self) -> None:
        """Write a line for each key with usage in no line; several if the sums exceed one line.

        Raises as `DayFile` does.
        """
        for key in [*self._missing]:
            while (total := self._missing[key]) != Totals():
                part = total.for_one_line()
                self._append({"time": _time(self._clock()), **_CARRIED, "key": key, **asdict(part)})
                self._missing[key] = total.without(part)
            del self._missing[key]

    def _follow(self) -> None:
        """Read the lines that any process has written since."""
        try:
            self._turn_to(self._today())
            if self._file is not None:
                self._file.read_on()
        except (OSError, ConfigError) as error:
            self._report("the ledger cannot be read", error)

    def _sync(self, file: DayFile, copy: int) -> None:
        """Sync `file`. `copy` is its descriptor from `take_to_sync`."""
        try:
            os.fsync(copy)
        except OSError as error:
            file.is_dirty = True
            self._report("the ledger cannot be synced to disk", error)
        finally:
            os.close(copy)

    def _report(self, what: str, error: Exception) -> None:
        """Log an error at once, and again every 30 s while it lasts."""
        now = self._monotonic()
        if now >= self._next_report.get(what, 0.0):
            self._next_report[what] = now + _REMINDER_S
            logger.error("%s: %s", what, error)


def read_ledger(folder: Path, since: date, until: date) -> Iterator[tuple[date, dict[str, Any]]]:
    """Yield the requests that ended on the days from `since` to `until`, inclusive.

    Raises `ConfigError`.
    """
    for path in sorted(folder.glob("usage-*.jsonl")):
        try:
            day = date.fromisoformat(path.stem.removeprefix("usage-"))
        except ValueError:
            continue
        if not since <= day <= until:
            continue
        try:
            file = open_ledger(path, os.O_RDONLY)
            try:
                for block in whole_lines(path, file):
                    yield from ((day, entry) for line in block.split(b"\n") if (entry := parse_line(line)) is not None)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
