"""The engine replicas that this process may route to, as the router last heard of them.

A module of its own because Ray copies the router's module by value: globals there would not be ours.
"""

from collections.abc import Mapping
from typing import Any

_replicas: dict[str, dict[str, Any]] = {}


def publish(replicas: Mapping[str, dict[str, Any]]) -> None:
    """Replace the set: replica id -> what its `record_replica_metadata` said."""
    global _replicas
    _replicas = dict(replicas)


def current() -> dict[str, dict[str, Any]]:
    """The set. Do not change it."""
    return _replicas
