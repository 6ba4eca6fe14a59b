"""The process's environment: its only reader and writer, and what Ray and the engines must find in it."""

import os
from collections.abc import Mapping

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
FAST_PATH_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    _HAPROXY: "1",
}
"""What `make serve` sets before Ray starts: HAProxy instead of Ray's Python proxy, and the ingress's application on the
event loop of its Ray replica, which otherwise gives it a thread and a loop of its own."""

HAPROXY_METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
INTERNAL_KEY_FILE = "SERVE_APP_INTERNAL_KEY_FILE"
"""Names the file that holds the launcher's own API key, for the ingress that it starts."""

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
"""What `make serve` sets besides. Ray's switch for clusters on desktop systems, off, gives the node the address
127.0.0.1, on which then all of Ray's own ports listen. Serve's controller looks after its replicas ten times a second
by default, for a fortieth of a core that the model needs. Two import paths name what the controller calls at its start
and what stands before Ray's own handling of a request. Serve looks after its proxies every 10 s by default. Without
Ray's GCS its processes end after a minute; the launcher ends them once the running requests have ended. For the
draining period an ingress that is replaced still takes what HAProxy sends it before it knows; without one, such
requests were cut. A replica that fails its health checks would get a minute to finish what it cannot finish, before it
is replaced. Ray's own metrics and its records of events and tasks are for a dashboard, which does not run here. Its
memory monitor ends workers when the machine is full, whoever filled it; the kernel ends whoever holds the most. Ray
runs workers at niceness 15, behind everything else on the machine. A text alone is encoded in a thread of ours: one of
the tokenizer's own would only be waited for."""

ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "GOMP_SPINCOUNT": "5000",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""What a replica sets before it loads torch. By default CUDA numbers GPUs from the fastest on; Ray and NVML, whose
numbers the replica gets and its metrics show, number them by their place on the bus. Threads spin for milliseconds
after each operation by default, on cores that our kernels and other processes need (measured: 0.8 ms of processor time
per token, beside the engine's 2.2). Weights and KV pool in huge pages, where the system has them for the asking, take 6
to 9 % off prefill's time."""


def fast_path_enabled() -> bool:
    """Whether this process was started with the environment of the fast path."""
    return all(os.environ.get(name) == value for name, value in FAST_PATH_ENVIRONMENT.items())


def haproxy_enabled() -> bool:
    """Whether HAProxy takes the place of Ray's proxy in a Ray that this process starts or belongs to."""
    return os.environ.get(_HAPROXY) == "1"


def haproxy_metrics_port() -> int:
    """The port of HAProxy's metrics. Raises `KeyError` where no launcher has chosen a port."""
    return int(os.environ[HAPROXY_METRICS_PORT])


def internal_key_file() -> str | None:
    """Where the launcher has put its own API key, if a launcher has started this process."""
    return os.environ.get(INTERNAL_KEY_FILE)


def client_api_key() -> str | None:
    """The API key with which our own commands ask a server; not an option, as command lines are for all to see."""
    return os.environ.get("SERVE_APP_API_KEY")


def memory_monitor_enabled() -> bool:
    """Whether a Ray that this process starts looks after the machine's memory."""
    return os.environ.get(_MEMORY_MONITOR) != LAUNCHER_ENVIRONMENT[_MEMORY_MONITOR]


def ray_temporary_folder() -> str:
    """Below which a Ray that this process starts keeps its sockets and logs."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def has_ray_token() -> bool:
    """Whether Ray's token comes from somewhere else than the user's home folder, or is not asked for."""
    told = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(os.environ.get(name) for name in told) or os.environ.get("RAY_AUTH_MODE") == "disabled"


def proxies_are_named() -> bool:
    """Whether the environment names a proxy, through which other programs send even requests to this machine."""
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)


def bypass_proxies(*hosts: str) -> None:
    """Have this process and its children send requests to loopback, and to `hosts`, past the environment's proxies.

    gRPC, curl and Python's libraries read these variables in different spellings; what the user excepts stays so.
    """
    if not proxies_are_named():
        return
    given = {name: _entries(os.environ.get(name, "")) for name in ("no_proxy", "NO_PROXY", _NO_GRPC_PROXY)}
    excepted = [*given["no_proxy"], *given["NO_PROXY"]]
    own = [*_LOOPBACK, *hosts]
    # An asterisk counts only where it stands alone, and gRPC does not know it.
    anything = "*" in excepted
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = "*" if anything else ",".join(dict.fromkeys([*excepted, *own]))
    for_grpc = [entry for entry in given[_NO_GRPC_PROXY] or excepted if entry != "*"]
    os.environ[_NO_GRPC_PROXY] = ",".join(dict.fromkeys([*for_grpc, *own]))


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def export(variables: Mapping[str, str]) -> None:
    """Set environment variables for this process and its children, except those that the user has set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
