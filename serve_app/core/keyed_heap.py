"""A priority queue whose keys can be re-ranked and removed at any position."""

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K")
R = TypeVar("R", int, float, tuple[int, int, int])


class KeyedHeap(Generic[K, R]):
    """Keys by rank, lowest first; ties by age. Every operation is amortized O(log n).

    A heap with lazy deletion: stale items stay until they reach the top or outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[R, int, K]] = []
        self._items: dict[K, tuple[R, int, K]] = {}
        self._ages = count()

    def put(self, key: K, rank: R) -> None:
        """Add `key`, or change its rank. A changed key becomes the youngest of its rank."""
        item = self._items.get(key)
        if item is not None and item[0] == rank:
            return
        self._items[key] = item = (rank, next(self._ages), key)
        heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._items) + 64:
            self._heap = list(self._items.values())
            heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove `key` if present."""
        self._items.pop(key, None)

    def first(self) -> K | None:
        """Return the key of the lowest rank; None if empty."""
        while self._heap:
            item = self._heap[0]
            if self._items.get(item[2]) is item:
                return item[2]
            heappop(self._heap)
        return None
