"""Passes the set of engine replicas from Ray's router to the ingress in the same process.

Ray creates the router, so the ingress cannot reach it. Ray also copies the router's module by
value, and may run the router in its own thread. So both use this module's object, the only state in
this process that is not passed by constructor.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

Replicas = Mapping[str, dict[str, Any]]
"""Replica id -> the result of its `record_replica_metadata`."""


class Membership:
    """Publishes the current set of replicas to listeners. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Replicas = {}
        self._listeners: list[Callable[[Replicas], object]] = []

    def publish(self, replicas: Replicas) -> None:
        """Replace the set and call the listeners."""
        with self._lock:
            self._current = dict(replicas)
            for listener in self._listeners:
                listener(self._current)

    def subscribe(self, listener: Callable[[Replicas], object]) -> None:
        """Call `listener` with the current set and with every later set, in order.

        It is called in any thread and must not block.
        """
        with self._lock:
            self._listeners.append(listener)
            listener(self._current)


engines = Membership()
"""This process's instance.

Access it as `membership.engines`: Ray copies the router by value, with everything that it imports
by name.
"""
