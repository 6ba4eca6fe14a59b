"""Limits how many request bodies may arrive at once, and which one is aborted for a new one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.errors import OverloadedError

_HURRY_S = 1.0
"""A body that began less than this many seconds ago is not aborted; the new one is refused instead.
"""


@dataclass(slots=True, eq=False)
class Upload:
    """A body that has arrived in part. `timer` aborts it. `begun`: event loop time, in seconds."""

    source: str
    timer: asyncio.Timeout
    begun: float
    displaced: bool = False


class Uploads:
    """At most `limit` bodies in progress.

    Beyond it, the oldest body of the address with the most bodies is aborted. So slow uploads are
    aborted first, and an address with many of them does not block others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_source: dict[str, dict[Upload, None]] = {}
        self._count = 0

    @contextmanager
    def under_way(self, source: str, timer: asyncio.Timeout) -> Iterator[Upload]:
        """Count a body while it arrives. `timer` is the timeout around reading it.

        Raises `OverloadedError`.
        """
        now = asyncio.get_running_loop().time()
        if self._count >= self._limit:
            self._displace(now)
        upload = Upload(source, timer, now)
        self._by_source.setdefault(source, {})[upload] = None
        self._count += 1
        try:
            yield upload
        finally:
            self._remove(upload)

    def _displace(self, now: float) -> None:
        largest = max(self._by_source.values(), key=len)
        oldest = next(iter(largest))
        if now - oldest.begun < _HURRY_S:
            raise OverloadedError(
                "too many large requests at the same time; retry later", code="bodies_full", retry_after_s=1.0
            )
        oldest.displaced = True
        oldest.timer.reschedule(now)
        self._remove(oldest)

    def _remove(self, upload: Upload) -> None:
        siblings = self._by_source.get(upload.source, {})
        if upload in siblings:
            del siblings[upload]
            self._count -= 1
            if not siblings:
                del self._by_source[upload.source]
