"""What has come for readers that have not taken it yet: bounded in bytes, for each stream and for all together.

A stream may hold as much as is left for all, so however many readers stand still, something is left for the others.
What exceeds the bound is not lost: the attempt ends, and the next one continues it when its reader has caught up.
"""

import asyncio
from typing import Any

from serve_app.fleet.wire import WireItem

MAX_STREAM_BYTES = 2 * 2**20
MAX_BYTES = 32 * 2**20
_DELTA_BYTES, _TUPLE_BYTES, _NUMBER_BYTES = 250, 56, 36


class UnreadBytes:
    """How much all streams of this process hold."""

    def __init__(self, max_stream_bytes: int = MAX_STREAM_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.max_stream_bytes = max_stream_bytes
        self.max_bytes = max_bytes
        self.held = 0

    def are_too_many(self, held_by_stream: int) -> bool:
        """Whether a stream that holds so much must get no more."""
        return held_by_stream > min(self.max_stream_bytes, self.max_bytes - self.held)


class UnreadItems:
    """The items of one attempt. For one event loop."""

    def __init__(self, total: UnreadBytes) -> None:
        self._total = total
        self._items: asyncio.Queue[tuple[WireItem | Exception, int]] = asyncio.Queue()
        self._held = 0

    @property
    def are_too_many(self) -> bool:
        """Whether there must be no more. One item alone is never too much: it is progress."""
        return self._items.qsize() > 1 and self._total.are_too_many(self._held)

    def put(self, item: WireItem | Exception) -> None:
        """Add one."""
        num_bytes = 0 if isinstance(item, Exception) else item_bytes(item)
        self._hold(num_bytes)
        self._items.put_nowait((item, num_bytes))

    async def get(self) -> WireItem | Exception:
        """The oldest, once there is one."""
        item, num_bytes = await self._items.get()
        self._hold(-num_bytes)
        return item

    def clear(self) -> None:
        """Nobody reads the rest."""
        while not self._items.empty():
            _, num_bytes = self._items.get_nowait()
            self._hold(-num_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._held += num_bytes
        self._total.held += num_bytes


def item_bytes(item: WireItem) -> int:
    """About how much memory an item takes. What belongs to one token takes as much for the others of its kind."""
    if isinstance(item, dict):
        return _DELTA_BYTES
    num_bytes = 0
    for delta in item:
        num_bytes += _DELTA_BYTES + _NUMBER_BYTES * len(delta[2])
        for results in delta[6:]:
            num_bytes += sum(len(entries) * _bytes_of(entries[0]) for entries in results.values() if entries)
    return num_bytes


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return _TUPLE_BYTES + sum(_bytes_of(part) for part in value)
    return len(value) if isinstance(value, str | bytes) else _NUMBER_BYTES
