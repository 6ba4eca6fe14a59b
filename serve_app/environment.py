"""All access to the process's environment, and the variables for Ray and the engines."""

import os
from collections.abc import Mapping

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
FAST_PATH_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    _HAPROXY: "1",
}
"""Set by `make serve` before Ray starts.

HAProxy replaces Ray's Python proxy, and the ingress's application runs on the event loop of its Ray
replica instead of a thread and loop of its own.
"""

HAPROXY_METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
INTERNAL_KEY_FILE = "SERVE_APP_INTERNAL_KEY_FILE"
"""Path of the file with the launcher's own API key, for the ingress that it starts."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_NO_GRPC_PROXY = "no_grpc_proxy"
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")

_MEMORY_MONITOR = "RAY_memory_monitor_refresh_ms"

LAUNCHER_ENVIRONMENT: Mapping[str, str] = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "serve_app.serving.ray_patches.keep_haproxy_running",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.serving.front.middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    _MEMORY_MONITOR: "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Also set by `make serve`, for these reasons:

- Ray's switch for clusters on desktop systems: off, so that the node has the address 127.0.0.1, on
  which all of Ray's ports then listen.
- Import paths: functions that the controller calls at its start, and middleware before Ray's
  handling of a request.
- Control loop: by default, Serve's controller checks replicas ten times a second, which takes 1/40
  of a core from the model.
- Draining period: a replaced ingress accepts requests until HAProxy knows of its replacement.
  Without the period, such requests were cut.
- Force stop: otherwise an unhealthy replica would get a minute to finish its requests before it is
  replaced.
- Proxy health checks: every 10 s by default.
- Metrics collection, event stats and task events: for a dashboard, which does not run here.
- GCS reconnect timeout: by default, Ray's processes end a minute after the loss of the GCS. The
  launcher ends them after the running requests.
- Memory monitor: ends workers when the machine is full, whichever process filled it. The kernel
  ends the process with the most memory.
- Worker niceness: 15 by default, behind everything else on the machine.
- Tokenizers: a text is encoded in a thread of ours, which would only wait for a thread of the
  tokenizer's own.
"""

ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "GOMP_SPINCOUNT": "5000",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Set by a replica before it imports torch.

- CUDA_DEVICE_ORDER: by default, CUDA numbers GPUs by speed. Ray and NVML, whose numbers the replica
  and its metrics use, number them by bus position.
- GOMP_SPINCOUNT: by default, threads spin for milliseconds after each operation, on cores that our
  kernels and other processes need (measured: 0.8 ms of CPU time per token, beside the engine's 2.2
  ms).
- THP_MEM_ALLOC_ENABLE: weights and KV pool in huge pages, if the system offers them on request,
  make prefill 6 to 9 % faster.
"""


def fast_path_enabled() -> bool:
    """Whether this process was started with the environment of the fast path."""
    return all(os.environ.get(name) == value for name, value in FAST_PATH_ENVIRONMENT.items())


def haproxy_enabled() -> bool:
    """Whether HAProxy replaces Ray's proxy in the Ray of this process."""
    return os.environ.get(_HAPROXY) == "1"


def haproxy_metrics_port() -> int:
    """Return the port of HAProxy's metrics. Raises `KeyError` if no launcher has chosen one."""
    return int(os.environ[HAPROXY_METRICS_PORT])


def internal_key_file() -> str | None:
    """Return the path of the launcher's API key; None without a launcher."""
    return os.environ.get(INTERNAL_KEY_FILE)


def client_api_key() -> str | None:
    """Return the API key of our own commands.

    Not a command-line option, because all users can see command lines.
    """
    return os.environ.get("SERVE_APP_API_KEY")


def memory_monitor_enabled() -> bool:
    """Whether Ray's memory monitor runs in a Ray that this process starts."""
    return os.environ.get(_MEMORY_MONITOR) != LAUNCHER_ENVIRONMENT[_MEMORY_MONITOR]


def ray_temporary_folder() -> str:
    """Return the folder in which a Ray started by this process keeps its sockets and logs."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def has_ray_token() -> bool:
    """Whether Ray's token is not read from the user's home folder, or not required."""
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(os.environ.get(name) for name in variables) or os.environ.get("RAY_AUTH_MODE") == "disabled"


def proxies_are_named() -> bool:
    """Whether the environment names a proxy.

    Other programs then use it even for requests to this machine.
    """
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)


def bypass_proxies(*hosts: str) -> None:
    """Exempt requests to loopback and `hosts` from proxies, for this process and its children.

    gRPC, curl and Python's libraries read these variables in different spellings. The user's own
    exceptions are kept.
    """
    if not proxies_are_named():
        return
    given = {name: _entries(os.environ.get(name, "")) for name in ("no_proxy", "NO_PROXY", _NO_GRPC_PROXY)}
    excepted = [*given["no_proxy"], *given["NO_PROXY"]]
    own = [*_LOOPBACK, *hosts]
    # An asterisk is valid only on its own, and gRPC does not support it.
    anything = "*" in excepted
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = "*" if anything else ",".join(dict.fromkeys([*excepted, *own]))
    for_grpc = [entry for entry in given[_NO_GRPC_PROXY] or excepted if entry != "*"]
    os.environ[_NO_GRPC_PROXY] = ",".join(dict.fromkeys([*for_grpc, *own]))


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def export(variables: Mapping[str, str]) -> None:
    """Set environment variables for this process and its children, except those set by the user."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
