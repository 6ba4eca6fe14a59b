"""Watches the processes of Ray's node that the server depends on, and reports the loss of one.

Runs in its own thread: without the GCS, Ray's calls block while its processes try to reconnect.
"""

import threading
from collections.abc import Callable

from serve_app.launch.ray_node import NodeProcess, node_processes

_LOOK_S = 0.1
_NEEDED = {
    "gcs_server": "Ray's GCS (pid {pid}) has ended ({status}): running requests may finish, then the server ends",
    "raylet": "Ray's raylet (pid {pid}) has ended ({status}), and with it all processes of the server",
}
_LEAVES_REQUESTS = "gcs_server"
_HELPFUL = {
    "log_monitor": "Ray's log monitor (pid {pid}) has ended ({status}): lines of replicas and ingress no longer appear "
    "here, only in Ray's log folder",
}


class NodeWatch:
    """Watches the processes of the Ray node that this process has started."""

    def __init__(self, on_loss: Callable[[str, bool], None], say: Callable[[str], None]) -> None:
        """`on_loss(line, can_drain)`: called when the server cannot continue.

        `can_drain`: whether running requests may finish. `say` prints other reports.
        """
        self._on_loss = on_loss
        self._say = say
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node watch", daemon=True)

    def start(self) -> None:
        """Start watching. Call this after this process has started the node."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, because the processes may end from now on. Idempotent."""
        self._closing.set()

    def _watch(self) -> None:
        texts = _NEEDED | _HELPFUL
        processes = [process for process in node_processes() if process.kind in texts]
        while not self._closing.wait(_LOOK_S):
            for process in [process for process in processes if process.status() is not None]:
                processes.remove(process)
                line = texts[process.kind].format(pid=process.pid, status=_how(process))
                if process.kind in _NEEDED:
                    self._on_loss(line, process.kind == _LEAVES_REQUESTS)
                    return
                self._say(line)


def _how(process: NodeProcess) -> str:
    status = process.status() or 0
    return f"signal {-status}" if status < 0 else f"status {status}"
