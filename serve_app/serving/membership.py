"""Which engine replicas Ray's controller offers, on the way from Ray's router to the ingress of the same process.

Ray makes the router, out of reach of the ingress, copies its module by value, and may run it in a thread of its own. So
the two meet in this module's object, the only state of this process that is not handed in by constructor.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

Replicas = Mapping[str, dict[str, Any]]
"""Replica id -> what its `record_replica_metadata` said."""


class Membership:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Replicas = {}
        self._listeners: list[Callable[[Replicas], object]] = []

    def publish(self, replicas: Replicas) -> None:
        """Replace the set."""
        with self._lock:
            self._current = dict(replicas)
            for listener in self._listeners:
                listener(self._current)

    def subscribe(self, listener: Callable[[Replicas], object]) -> None:
        """Tell `listener` the set, and each one that follows, in order. It may be in any thread and must not block."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._current)


engines = Membership()
"""This process's one. Reach it through the module: Ray copies the router by value, and what it imported by name too."""
