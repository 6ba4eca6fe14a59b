"""Buffers outputs that readers have not taken yet, bounded in bytes per stream and in total.

A stream may hold at most as much as is left of the total, so that stalled readers always leave room
for others. Nothing is lost beyond the bound: the attempt ends, and the next one continues when the
reader has caught up.
"""

import asyncio
from typing import Any

from serve_app.fleet.wire import WireItem

MAX_STREAM_BYTES = 2 * 2**20
MAX_BYTES = 32 * 2**20
_DELTA_BYTES, _TUPLE_BYTES, _NUMBER_BYTES = 250, 56, 36


class UnreadBytes:
    """Counts the bytes that all streams of this process hold."""

    def __init__(self, max_stream_bytes: int = MAX_STREAM_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.max_stream_bytes = max_stream_bytes
        self.max_bytes = max_bytes
        self.held = 0

    def are_too_many(self, held_by_stream: int) -> bool:
        """Whether a stream that holds `held_by_stream` bytes must get no more."""
        return held_by_stream > min(self.max_stream_bytes, self.max_bytes - self.held)


class UnreadItems:
    """The unread items of one attempt. Not thread-safe."""

    def __init__(self, total: UnreadBytes) -> None:
        self._total = total
        self._items: asyncio.Queue[tuple[WireItem | Exception, int]] = asyncio.Queue()
        self._held = 0

    @property
    def are_too_many(self) -> bool:
        """Whether no more items may be added. A single item is always allowed, to make progress."""
        return self._items.qsize() > 1 and self._total.are_too_many(self._held)

    def put(self, item: WireItem | Exception) -> None:
        """Add an item."""
        num_bytes = 0 if isinstance(item, Exception) else item_bytes(item)
        self._hold(num_bytes)
        self._items.put_nowait((item, num_bytes))

    async def get(self) -> WireItem | Exception:
        """Wait for the oldest item and remove it."""
        item, num_bytes = await self._items.get()
        self._hold(-num_bytes)
        return item

    def clear(self) -> None:
        """Drop all items."""
        while not self._items.empty():
            _, num_bytes = self._items.get_nowait()
            self._hold(-num_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._held += num_bytes
        self._total.held += num_bytes


def item_bytes(item: WireItem) -> int:
    """Estimate the memory of an item in bytes.

    Assumes that all tokens of an item have results of the same size.
    """
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
