"""The Ray node that `serve-app serve` starts for itself, without what nobody there uses.

Uses what Ray does not document, read from Ray 2.60.0 and to be read again when the pin in pyproject.toml moves:
`ray._private.services.start_api_server` (replaced) and the node's processes (`ray._private.worker._global_node`). The
rest of that is in `serving/ray_patches.py`.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_OBJECT_STORE_BYTES = 100 * 2**20


def start_node() -> None:
    """Start a node, as a child of this process, and connect to it."""
    import ray
    from ray._private import services

    # Without a dashboard its server would start all the same, for usage statistics (which nobody gets from us), and
    # `ray.init` would wait for it.
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
    """A process that `start_node` has started. `kind`: Ray's name, as in `gcs_server`, `raylet`, `log_monitor`."""

    kind: str
    process: Any

    @property
    def pid(self) -> int:
        """The process's id."""
        return int(self.process.pid)

    def status(self) -> int | None:
        """How it has ended, as `subprocess` says it; None while it runs."""
        status: int | None = self.process.poll()
        return status


def node_processes() -> list[NodeProcess]:
    """Those of the node that this process has started."""
    from ray._private import worker

    kinds = worker._global_node.all_processes.items()
    return [NodeProcess(kind, started.process) for kind, processes in kinds for started in processes]


def load_application() -> None:
    """Have a process of the node's load `serve_app.app` from now on.

    Serve's controller has the application built in such a process once the proxies are up. One that has loaded it by
    then saves the seconds in which everything else would wait.
    """
    import ray

    ray.remote(num_cpus=0)(_import_application).remote()


def _import_application() -> None:
    with suppress(Exception):  # whoever builds it is told
        import serve_app.app  # noqa: F401
