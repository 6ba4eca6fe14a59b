"""Where this project's own log lines go inside Ray's workers: to the process's original standard error.

Ray carries that to the terminal of the driver, with the worker's name in front. Serve would keep it: it points
`sys.stdout`, `sys.stderr` and `print` of a replica at the replica's log file.

Generation requests are logged as JSON, one object a line, without prompts and answers. Of errors that repeat, the first
few of each period are logged and the others counted. Uses of admin keys are logged the same way.
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
"""Lines of requests that end with the same error, in one period."""

_ADMIN_PERIOD_S = 3600.0
_MAX_ADMIN_USES = 10_000

_requests = logging.getLogger("serve_app.requests")


def log_to_terminal(level: int = logging.INFO) -> None:
    """Send records of the loggers below `serve_app` to the terminal of whoever started the server."""
    _send(logging.getLogger("serve_app"), "%(levelname)s %(name)s: %(message)s", level)
    _send(_requests, "%(message)s", level)


class RequestLines:
    """One line per request; of requests with the same error, `_EACH_ERROR` lines a period, then a count of the rest."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        """`later` calls a function after so many seconds (an event loop's `call_later`)."""
        self._later = later
        self._counts: Counter[str] = Counter()

    def __call__(self, summary: Mapping[str, Any]) -> None:
        """Log the summary of a request that has ended (see `log_request`), now or in a sum."""
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
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        for error, count in counts.items():
            if count > _EACH_ERROR:
                line = {"time": now, "error": error, "more": count - _EACH_ERROR, "seconds": _SUM_PERIOD_S}
                _requests.info("%s", orjson.dumps(line).decode())


def log_request(summary: Mapping[str, Any]) -> None:
    """One line of JSON about a request that has ended: the fields of the API's `RequestSummary`, times to 0.1 ms."""
    fields = {name: round(value, 4) if isinstance(value, float) else value for name, value in summary.items()}
    ended_at = datetime.fromtimestamp(fields.pop("started_at") + fields["seconds"], UTC)
    line = {"time": ended_at.isoformat(timespec="milliseconds"), **fields}
    # JSON has no raw line breaks or control characters, so nothing in a field can begin another line.
    _requests.info("%s", orjson.dumps(line).decode())


class AdminLines:
    """One line of JSON for each admin key and path, at most once an hour: pages ask every second. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}

    def __call__(self, key: str, path: str) -> None:
        """The admin key of this name was used for `path`."""
        now = self._clock()
        if now - self._logged_at.get((key, path), -math.inf) < _ADMIN_PERIOD_S:
            return
        if len(self._logged_at) >= _MAX_ADMIN_USES:
            self._logged_at.clear()
        self._logged_at[key, path] = now
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "admin_key": key, "path": path}
        _requests.info("%s", orjson.dumps(line).decode())


def _send(logger: logging.Logger, form: str, level: int) -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(form))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
