"""Where this project's own log lines go inside Ray's workers: to the process's original standard error.

Ray carries that to the terminal of the driver, with the worker's name in front. Serve would keep it: it points
`sys.stdout`, `sys.stderr` and `print` of a replica at the replica's log file.

Generation requests are logged as JSON, one object a line, without any text of theirs.
"""

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_requests = logging.getLogger("serve_app.requests")


def log_to_terminal(level: int = logging.INFO) -> None:
    """Send records of the loggers below `serve_app` to the terminal of whoever started the server."""
    _send(logging.getLogger("serve_app"), "%(levelname)s %(name)s: %(message)s", level)
    _send(_requests, "%(message)s", level)


def log_request(summary: Mapping[str, Any]) -> None:
    """One line of JSON about a request that has ended: the fields of the API's `RequestSummary`, times to 0.1 ms."""
    fields = {name: round(value, 4) if isinstance(value, float) else value for name, value in summary.items()}
    time = datetime.fromtimestamp(fields.pop("started_at") + fields["seconds"], UTC)
    line = {"time": time.isoformat(timespec="milliseconds"), **fields}
    # JSON has no raw line breaks or control characters, so nothing in a field can begin another line.
    _requests.info("%s", orjson.dumps(line).decode())


def _send(logger: logging.Logger, form: str, level: int) -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(form))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
