"""Writes this project's log lines in Ray's workers to the process's original standard error.

Ray forwards that to the driver's terminal, with the worker's name in front. Serve redirects
`sys.stdout`, `sys.stderr` and `print` of a replica to its log file, so these cannot be used.

Generation requests are logged as JSON, one object per line, without prompts and answers. Of
repeated errors, the first few in each period are logged and the others counted. Uses of admin keys
are logged in the same way.
"""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_SUM_PERIOD_S = 10.0
_EACH_ERROR = 20
"""Maximum of lines per period for requests that end with the same error."""

_ADMIN_PERIOD_S = 3600.0
_MAX_ADMIN_USES = 10_000

_requests = logging.getLogger("serve_app.requests")


def log_to_terminal(level: int = logging.INFO) -> None:
    """Send records of the loggers below `serve_app` to the terminal that started the server."""
    _send(logging.getLogger("serve_app"), "%(levelname)s %(name)s: %(message)s", level)
    _send(_requests, "%(message)s", level)


class RequestLines:
    """Logs one line per request, but at most `_EACH_ERROR` per error and period, then a count."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        """`later(seconds, function)` calls a function later, like an event loop's `call_later`."""
        self._later = later
        self._counts: Counter[str] = Counter()

    def __call__(self, summary: Mapping[str, Any]) -> None:
        """Log the summary of an ended request (see `log_request`), or count it."""
        error = summary["error"]
        if error is None:
            log_request(summary)
            return
        if not self._counts:
            self._later(_SUM_PERIOD_S, self._log_sums)
        self._counts[error] += 1
        if self._counts[error] <= _EACH_ERROR:
            log_request(summary)

    def _log_sums(self) -> None:
        counts, self._counts = self._counts, Counter()
        for error, count in counts.items():
            if count > _EACH_ERROR:
                _log(datetime.now(UTC), {"error": error, "more": count - _EACH_ERROR, "seconds": _SUM_PERIOD_S})


def log_request(summary: Mapping[str, Any]) -> None:
    """Log an ended request as one line of JSON.

    The fields are those of the API's `RequestSummary`, with times rounded to 0.1 ms.
    """
    fields = {name: round(value, 4) if isinstance(value, float) else value for name, value in summary.items()}
    ended_at = datetime.fromtimestamp(fields.pop("started_at") + fields["seconds"], UTC)
    _log(ended_at, fields)


class AdminLines:
    """Logs one JSON line per admin key and path, at most once an hour. Not thread-safe.

    Limited because console pages send requests every second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns seconds."""
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}

    def __call__(self, key: str, path: str) -> None:
        """Log that the admin key named `key` was used for `path`."""
        now = self._clock()
        if now - self._logged_at.get((key, path), -math.inf) < _ADMIN_PERIOD_S:
            return
        if len(self._logged_at) >= _MAX_ADMIN_USES:
            self._logged_at.clear()
        self._logged_at[key, path] = now
        _log(datetime.now(UTC), {"admin_key": key, "path": path})


def _log(when: datetime, fields: Mapping[str, Any]) -> None:
    line = {"time": when.isoformat(timespec="milliseconds"), **fields}
    # JSON escapes line breaks and control characters, so no field can start a new line.
    _requests.info("%s", orjson.dumps(line).decode())


def _send(logger: logging.Logger, form: str, level: int) -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(form))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
