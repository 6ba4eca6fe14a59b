"""Where this project's own log lines go inside Ray's workers: to the process's original standard error.

Ray carries that to the terminal of the driver, with the worker's name in front. Serve would keep it: it points
`sys.stdout`, `sys.stderr` and `print` of a replica at the replica's log file.
"""

import logging
import sys


def log_to_terminal(level: int = logging.INFO) -> None:
    """Send records of the loggers below `serve_app` to the terminal of whoever started the server."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("serve_app")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
