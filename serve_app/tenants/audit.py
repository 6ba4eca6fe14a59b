"""The audit log: use of admin routes and changes of keys, as JSON lines, one file per UTC month."""

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import orjson

from serve_app.errors import ConfigError
from serve_app.system.operator_files import open_regular

logger = logging.getLogger(__name__)

_PERIOD_S = 3600
_MAX_REMEMBERED = 10_000


class AuditLog:
    """The audit log in one folder. For several threads; a line that cannot be written is logged as an error."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix time in seconds."""
        self._folder = folder
        self._clock = clock
        self._seen: dict[tuple[str, str], float] = {}

    def accessed(self, key: str, path: str) -> None:
        """An admin's key was used for `path`. Pages ask every second: an hour has one line for each."""
        now = self._clock()
        if now - self._seen.get((key, path), -_PERIOD_S) < _PERIOD_S:
            return
        if len(self._seen) >= _MAX_REMEMBERED:
            self._seen.clear()
        self._seen[key, path] = now
        self._write(now, {"key": key, "accessed": path})

    def keys_changed(self, news: str) -> None:
        """The keys file was read again."""
        self._write(self._clock(), {"keys": news})

    def _write(self, now: float, fields: dict[str, str]) -> None:
        when = datetime.fromtimestamp(now, UTC)
        line = orjson.dumps({"time": when.isoformat(timespec="milliseconds"), **fields}) + b"\n"
        path = self._folder / f"audit-{when:%Y-%m}.jsonl"
        try:
            file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except (OSError, ConfigError) as error:
            logger.error("the audit log %s cannot be written: %s", path, error)
