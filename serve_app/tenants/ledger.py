"""Who has used what: one JSON line per request that was computed, in a file per UTC day. Never text.

A line is in the file before its client is told the end, so no ended request is lost with the process; `sync` puts it
on the disk. Several processes may write the same files: lines are appended whole.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson

from serve_app.errors import ConfigError

logger = logging.getLogger(__name__)


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
        """Count one line of a ledger, or a `Spent` as a dict."""
        self.requests += 1
        self.prompt_tokens += line["prompt_tokens"]
        self.cached_tokens += line["cached_tokens"]
        self.output_tokens += line["output_tokens"]
        self.reasoning_tokens += line.get("reasoning_tokens", 0)  # older lines have none


class Ledger:
    """The ledger in one folder, and today's sums by key, of all processes that write there. For one thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time in seconds. Raises `ConfigError` if the folder cannot be written."""
        self._folder = folder
        self._clock = clock
        self._day: date | None = None
        self._file = -1
        self._read = 0
        self._rest = b""
        self._totals: dict[str, Totals] = defaultdict(Totals)
        self._dirty = False
        self._failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._turn_to(self._today())
        except OSError as error:
            raise ConfigError(f"setting `ingress.ledger_folder`: {folder}: {error.strerror}") from None

    def today(self, key: str) -> Totals:
        """What `key` has used since midnight, UTC. Not to be changed."""
        self._follow()
        return self._totals[key]

    def write(self, spent: Spent) -> None:
        """Add a line. Where that fails, it is logged, and today's sums count it all the same."""
        now = self._clock()
        entry = {"time": _time(now), **asdict(spent), "seconds": round(spent.seconds, 4)}
        try:
            self._turn_to(datetime.fromtimestamp(now, UTC).date())
            line = b"\n" * self._failed + orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
            if os.write(self._file, line) < len(line):
                raise OSError("the disk is full")
        except OSError as error:
            self._totals[spent.key].add(entry)
            if not self._failed:
                logger.error("the ledger cannot be written, requests are missing from it: %s", error)
            self._failed = True
            return
        self._failed = False
        self._dirty = True

    def sync(self) -> None:
        """Put what was written on the disk. Blocks; may run in another thread."""
        if self._dirty:
            self._dirty = False
            os.fsync(self._file)

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), UTC).date()

    def _turn_to(self, day: date) -> None:
        """Let the file be that of `day`. Raises `OSError`."""
        if day == self._day:
            return
        file = os.open(ledger_file(self._folder, day), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
        self._file, self._day, self._read, self._rest = file, day, 0, b""
        self._totals.clear()
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")  # the end of a line that a loss of power has cut

    def _follow(self) -> None:
        """Count what has been written since, by whomever."""
        try:
            self._turn_to(self._today())
            while data := os.pread(self._file, 2**20, self._read):
                self._read += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    if (entry := _parse(line)) is not None:
                        self._totals[entry["key"]].add(entry)
        except OSError as error:
            logger.error("the ledger cannot be read: %s", error)


def ledger_file(folder: Path, day: date) -> Path:
    """Where the requests that ended on `day`, UTC, are."""
    return folder / f"usage-{day:%Y-%m-%d}.jsonl"


def read_ledger(folder: Path, since: date, until: date) -> Iterator[tuple[date, dict[str, Any]]]:
    """The requests that ended on the days from `since` to `until`, both included."""
    for path in sorted(folder.glob("usage-*.jsonl")):
        try:
            day = date.fromisoformat(path.stem.removeprefix("usage-"))
        except ValueError:
            continue
        if not since <= day <= until:
            continue
        with path.open("rb") as file:
            for line in file:
                if (entry := _parse(line)) is not None:
                    yield day, entry


def _parse(line: bytes) -> dict[str, Any] | None:
    """A line that was written whole; None for what is left of another."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and "output_tokens" in entry else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
