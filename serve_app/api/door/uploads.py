"""Request bodies that are being received: how many there may be at once, and which is ended to make room."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.errors import OverloadedError

_HURRY_S = 1.0
"""A body that began less than this long ago is not ended; then the new one is refused."""


@dataclass(slots=True, eq=False)
class Upload:
    """A body of which a part has arrived. `timer` ends it; `begun` is on the event loop's clock, in seconds."""

    source: str
    timer: asyncio.Timeout
    begun: float
    displaced: bool = False


class Uploads:
    """At most `limit` bodies under way. For one more, the oldest body of the address that has most of them is ended.

    So slow ones lose first, and an address that sends many slow ones takes nothing from others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_source: dict[str, dict[Upload, None]] = {}
        self._count = 0

    @contextmanager
    def under_way(self, source: str, timer: asyncio.Timeout) -> Iterator[Upload]:
        """While a body arrives; `timer` is the time limit around its reading. Raises `OverloadedError`."""
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
                "too many large requests at one time; retry later", code="bodies_full", retry_after_s=1.0
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
