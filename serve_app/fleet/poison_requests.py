"""Remembers for some minutes which requests killed replicas, so that repeats are refused.

Requests are compared by prompt and parameters without the seed, which differs each time unless the
client sets it.
"""

import hashlib
from collections import OrderedDict
from dataclasses import replace

from serve_app.core.request import EngineRequest

_REMEMBERED_S = 300.0
_MAX_REMEMBERED = 1024


class PoisonRequests:
    """Times are in seconds of one clock. Bounded: the oldest entry is dropped first."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: EngineRequest, now: float) -> None:
        """Remember a request that killed replicas."""
        digest = _digest(request)
        self._until.pop(digest, None)
        self._until[digest] = now + _REMEMBERED_S
        if len(self._until) > _MAX_REMEMBERED:
            self._until.popitem(last=False)

    def knows(self, request: EngineRequest, now: float) -> bool:
        """Whether an equal request was added in the last few minutes."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return bool(self._until) and _digest(request) in self._until


def _digest(request: EngineRequest) -> bytes:
    params = replace(request.params, seed=None)
    return hashlib.sha256(repr((request.prompt_token_ids, params)).encode()).digest()
