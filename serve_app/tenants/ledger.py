"""Who has used what: one JSON line per request that was computed, in a file per UTC day. Never text.

A line is in the file before its client receives the end, so no ended request is lost with the process; `sync` puts it
on the disk. Several processes may write the same files: lines are appended whole.

Today's sums outlive the file: what it lost or could not take is written again, as one line per key with the sums.
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
"""How long an event loop waits for a `look` in another thread, which takes 0.1 ms unless something has happened."""
_CARRIED = {"model": "", "revision": "", "request_id": "", "endpoint": "", "outcome": "carried", "seconds": 0.0}
"""Of a line with the sums of requests whose own lines were lost, or could not be written."""


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


class Ledger:
    """The ledger in one folder, and today's sums by key, of all processes that write there.

    For an event loop, with `look` and `sync` in another thread: while these are held up, as by a file system that
    does not answer, the loop goes on with the sums that it knows, and its lines wait.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        must_open: bool = True,
    ) -> None:
        """`clock`: Unix time in seconds.

        Raises `ConfigError` if the folder cannot be written, or today's file is no ledger; unless `must_open`, it is
        logged and tried again.
        """
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._day: date | None = None
        self._file: DayFile | None = None
        self._missing: dict[str, Totals] = defaultdict(Totals)
        """What was used and is in no line."""
        self._next_report: dict[str, float] = {}
        self.error: str | None = None
        """Why today's file could not be used at the last `look`; None if it could."""
        self._files = threading.Lock()
        """Of all above."""
        self._known: Mapping[str, Totals] = {}
        """The sums when the latest `look` began; they have nothing that waits."""
        self._waiting: list[tuple[float, Spent]] = []
        """What ended while a `look` was held up, with the time of its end. The event loop's alone."""
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
                if isinstance(error, ConfigError):  # which names the file
                    reason = str(error)
                raise ConfigError(f"setting `ingress.ledger_folder`: {reason}") from None
            self.look()

    @property
    def is_open(self) -> bool:
        """Whether there is a file for today's lines; without one, only memory has them."""
        return self._file is not None

    def close(self) -> None:
        """Let go of the file, as of one that was only opened to see whether that is possible."""
        self._use(None)

    def today(self, key: str) -> Totals:
        """What `key` has used since midnight, UTC."""
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
        """Add a line. Where that fails, it is logged, and today's sums count it all the same."""
        self._waiting.append((self._clock(), spent))
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, unless a `look` is held up. To be called after each."""
        with self._at_once():
            pass

    def look(self) -> None:
        """Notice that today's file was removed, moved, truncated or locked away, and write what it lacks.

        To be called every moment, in any thread; fast unless something has happened. Errors are logged and tried again.
        """
        with self._files:
            self._known = {key: self._total(key) for key in {*self._missing, *self._read_totals()}}
            try:
                self._look()
                self.error = None
            except BlockingIOError:
                pass  # another process writes what the file lacks
            except (OSError, ConfigError) as error:
                self.error = str(error)
                self._report("the ledger's file of today cannot be used; today's sums are kept in memory", error)

    def sync(self) -> None:
        """Put what was written on the disk. Blocks; for any thread. Errors are logged and tried again."""
        with self._files:
            file = self._file
            copy = None if file is None else file.take_to_sync()
        if file is not None and copy is not None:
            self._sync(file, copy)

    @contextmanager
    def _at_once(self) -> Iterator[bool]:
        """Whether the files are the event loop's inside, which they are not while a `look` is held up."""
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
        """Raises `OSError` and `ConfigError`."""
        if self._file is None:
            raise OSError("today's file is not open")
        self._file.append(entry)

    def _look(self) -> None:
        """Raises `OSError` and `ConfigError`."""
        self._turn_to(self._today())
        if self._file is None or self._file.is_lost():
            self._open_again()
        else:
            self._file.read_on()
        self._write_missing()
        os.close(open_ledger(ledger_file(self._folder, self._today()), os.O_RDWR))  # as the next start does

    def _turn_to(self, day: date) -> None:
        """Let the file be that of `day`. Raises as `DayFile` does; without a file then, until `look` has opened it."""
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
        """From now on; the one before is closed."""
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
        """Take the file that has this name now, or a new one, and write what it lacks. Raises as `DayFile` does.

        Other processes may find the same loss, before or after: the first writes all sums, and up to
        where in the lost file they go; the next ones what was written to that since. Without such a
        mark, as in a file that an operator has put there, the difference of the sums is written.
        """
        assert self._day is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        lost, file = self._file, DayFile(self._folder, self._day)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or unlocked
            with suppress(OSError, ConfigError):  # of a file that has become unreadable, what was read counts
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
        """A line for each key of what is in no line; more of sums too large for one. Raises as `DayFile` does."""
        for key in [*self._missing]:
            while (total := self._missing[key]) != Totals():
                part = total.for_one_line()
                self._append({"time": _time(self._clock()), **_CARRIED, "key": key, **asdict(part)})
                self._missing[key] = total.without(part)
            del self._missing[key]

    def _follow(self) -> None:
        """Count what has been written since, by any process."""
        try:
            self._turn_to(self._today())
            if self._file is not None:
                self._file.read_on()
        except (OSError, ConfigError) as error:
            self._report("the ledger cannot be read", error)

    def _sync(self, file: DayFile, copy: int) -> None:
        """`copy`: the descriptor that `file` gave for this."""
        try:
            os.fsync(copy)
        except OSError as error:
            file.is_dirty = True
            self._report("the ledger cannot be put on the disk", error)
        finally:
            os.close(copy)

    def _report(self, what: str, error: Exception) -> None:
        """Once, and again every 30 s while it lasts."""
        now = self._monotonic()
        if now >= self._next_report.get(what, 0.0):
            self._next_report[what] = now + _REMINDER_S
            logger.error("%s: %s", what, error)


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
