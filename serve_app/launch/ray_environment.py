"""The environment in which `serve-app serve` starts Ray."""

import os
from collections.abc import Mapping
from pathlib import Path

from serve_app.environment import (
    FAST_PATH_ENVIRONMENT,
    HAPROXY_METRICS_PORT,
    INTERNAL_KEY_FILE,
    LAUNCHER_ENVIRONMENT,
)
from serve_app.launch import haproxy
from serve_app.launch.ports import free_port
from serve_app.launch.tls import HAPROXY_SOCKET

INTERNAL_KEY = "internal-key"
"""Name of the file with the launcher's own API key."""


def launcher_environment(scratch: Path) -> Mapping[str, str]:
    """Return the variables for Ray's environment. Variables set by the user take precedence."""
    return {
        **FAST_PATH_ENVIRONMENT,
        **LAUNCHER_ENVIRONMENT,
        # The default of four has more wake-ups for the same answers, on cores that the model needs.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, max(1, (os.cpu_count() or 1) // 4))),
        # Twice the ingress's limit for headers, so that the ingress explains most refusals. Beyond
        # it, HAProxy answers with a page of its own.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(32 * 2**10),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy.write_wrapper(scratch)),
        INTERNAL_KEY_FILE: str(scratch / INTERNAL_KEY),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / HAPROXY_SOCKET),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        HAPROXY_METRICS_PORT: str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }
