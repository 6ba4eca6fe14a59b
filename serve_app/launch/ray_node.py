"""Starts the Ray node of `serve-app serve`, without components that it does not use.

Uses undocumented parts of Ray, read from Ray 2.60.0: `ray._private.services.start_api_server`
(replaced) and the node's processes (`ray._private.worker._global_node`). Read them again when the
pin in pyproject.toml changes. Other undocumented parts are in `serving/ray_patches.py`.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_OBJECT_STORE_BYTES = 100 * 2**20


def start_node() -> None:
    """Start a node as a child of this process and connect to it."""
    import ray
    from ray._private import services

    # Even without a dashboard, Ray would start its server for usage statistics, which we do not
    # send, and `ray.init` would wait for it.
    services.start_api_server = lambda *_arguments, **_options: (None, None)
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="error",
    )


@dataclass(frozen=True)
class NodeProcess:
    """A process of the node. `kind`: Ray's name, such as `gcs_server` or `raylet`."""

    kind: str
    process: Any

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self.process.pid)

    def status(self) -> int | None:
        """Return the exit status as `subprocess` does; None while the process runs."""
        status: int | None = self.process.poll()
        return status


def node_processes() -> list[NodeProcess]:
    """Return the processes of the node that this process has started."""
    from ray._private import worker

    kinds = worker._global_node.all_processes.items()
    return [NodeProcess(kind, started.process) for kind, processes in kinds for started in processes]


def load_application() -> None:
    """Make one of the node's worker processes import `serve_app.app` now.

    Serve's controller builds the application in such a process once the proxies are up. If it is
    already imported, the start is some seconds faster.
    """
    import ray

    ray.remote(num_cpus=0)(_import_application).remote()


def _import_application() -> None:
    with suppress(Exception):  # the build reports the error
        import serve_app.app  # noqa: F401
