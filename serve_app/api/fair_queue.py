"""Who is served next, and who gives way: requests wait in one line per client, and the clients take turns.

Decides an order and nothing else: no clock, no bound, no asyncio. Fair between API keys, then between the users of one
key, by hierarchical self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing Scheme for Broadband
Applications", INFOCOM 1994): a client's next request is tagged with the node's clock plus the request's cost, the
lowest tag is served and sets the clock. So a client that returns owes nothing and has saved nothing, and nobody's tag
is ever overtaken more than once per other client and unit of cost. All operations are O(log clients).
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(eq=False, slots=True)
class Entry:
    """One waiting request: `remaining` parts that are served one by one, each of `cost` sequences.

    client: the levels of fairness, outermost first. kept: it gives way after those that are not.
    """

    client: tuple[str, ...]
    cost: int = 1
    remaining: int = 1
    priority: int = 0
    kept: bool = False
    started: bool = field(default=False, init=False)

    @property
    def size(self) -> int:
        """Sequences that wait."""
        return self.cost * self.remaining


class FairQueue:
    """Entries of the lowest priority number first; within a priority the clients take turns."""

    def __init__(self) -> None:
        self.size = 0
        self._classes: dict[int, _Turns] = {}
        self._first: _Ranking[int] = _Ranking()
        self._last: _Ranking[int] = _Ranking()

    def add(self, entry: Entry) -> None:
        """To the end of its client's line."""
        if entry.priority not in self._classes:
            self._classes[entry.priority] = _Turns(len(entry.client))
            self._first.put(entry.priority, entry.priority)
            self._last.put(entry.priority, -entry.priority)
        self._classes[entry.priority].add(entry, 0)
        self.size += entry.size

    def take(self) -> Entry:
        """Serve one part of the entry whose turn it is. The queue must not be empty."""
        entry = self._classes[self._first.best()].take()
        self._shrunk(entry, entry.cost)
        return entry

    def drop(self, entry: Entry, parts: int) -> None:
        """Forget `parts` parts of a waiting entry."""
        self._classes[entry.priority].drop(entry, parts, 0)
        self._shrunk(entry, parts * entry.cost)

    def ahead_of(self, entry: Entry) -> int:
        """Sequences served before the last of `entry`, if it came now and nobody after it; at most a little more."""
        ahead = 0
        for priority, turns in self._classes.items():
            if priority < entry.priority:
                ahead += turns.size
            elif priority == entry.priority:
                ahead += turns.ahead_of(entry, 0)
        return ahead

    def giving_way(self, entry: Entry, needed: int) -> list[Entry]:
        """Whom `entry`, not yet added, may push out to gain `needed` sequences; nobody if it is not entitled to.

        The longest line of the lowest priority gives way, its newest first, as long as it stays at least as long as
        the newcomer's; a line of better priority never does. Entries of which a part was served stay.
        """
        if not self.size:
            return []
        worst = self._last.best()
        if worst < entry.priority:
            return []
        line = self._classes[worst].longest(entry if worst == entry.priority else None, needed, 0)
        return line.newest(needed) if line is not None else []

    def _shrunk(self, entry: Entry, sequences: int) -> None:
        self.size -= sequences
        if not self._classes[entry.priority].size:
            del self._classes[entry.priority]
            self._first.discard(entry.priority)
            self._last.discard(entry.priority)


class _Line:
    """One client's entries, first come first served."""

    def __init__(self) -> None:
        self.size = 0
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self._fresh: OrderedDict[Entry, None] = OrderedDict()

    @property
    def next_cost(self) -> int:
        return next(iter(self._entries)).cost

    def add(self, entry: Entry, _level: int) -> None:
        self._entries[entry] = None
        if not entry.kept:
            self._fresh[entry] = None
        self.size += entry.size

    def take(self) -> Entry:
        entry = next(iter(self._entries))
        entry.started = True
        self._fresh.pop(entry, None)
        self.drop(entry, 1, 0)
        return entry

    def drop(self, entry: Entry, parts: int, _level: int) -> None:
        self.size -= parts * entry.cost
        entry.remaining -= parts
        if not entry.remaining:
            del self._entries[entry]
            self._fresh.pop(entry, None)

    def ahead_of(self, entry: Entry, _level: int) -> int:
        return self.size

    def longest(self, newcomer: Entry | None, _needed: int, _level: int) -> "_Line | None":
        return self if newcomer is None else None

    def newest(self, needed: int) -> list[Entry]:
        found: list[Entry] = []
        for entry in self._newest_first():
            found.append(entry)
            needed -= entry.size
            if needed <= 0:
                return found
        return []

    def _newest_first(self) -> Iterator[Entry]:
        yield from reversed(self._fresh)
        yield from (entry for entry in reversed(self._entries) if entry.kept and not entry.started)


class _Turns:
    """Clients (or the users of one) that take turns."""

    def __init__(self, depth: int) -> None:
        self.size = 0
        self._depth = depth
        self._clock = 0
        self._children: dict[str, _Turns | _Line] = {}
        self._since: dict[str, int] = {}
        self._tags: _Ranking[str] = _Ranking()
        self._lengths: _Ranking[str] = _Ranking()

    @property
    def next_cost(self) -> int:
        return self._children[self._tags.best()].next_cost

    def add(self, entry: Entry, level: int) -> None:
        name = entry.client[level]
        if name not in self._children:
            self._children[name] = _Turns(self._depth - 1) if self._depth > 1 else _Line()
            self._since[name] = self._clock
        self._children[name].add(entry, level + 1)
        self.size += entry.size
        self._update(name)

    def take(self) -> Entry:
        name = self._tags.best()
        self._clock = self._since[name] = self._since[name] + self._children[name].next_cost
        entry = self._children[name].take()
        self.size -= entry.cost
        self._update(name)
        return entry

    def drop(self, entry: Entry, parts: int, level: int) -> None:
        name = entry.client[level]
        self._children[name].drop(entry, parts, level + 1)
        self.size -= parts * entry.cost
        self._update(name)

    def ahead_of(self, entry: Entry, level: int) -> int:
        child = self._children.get(entry.client[level])
        own = child.ahead_of(entry, level + 1) if child is not None else 0
        others = len(self._children) - (child is not None)
        # While `own` and the entry itself are served, each other client is served as much, or all it has.
        return own + min(self.size - (child.size if child is not None else 0), (own + entry.size) * others)

    def longest(self, newcomer: Entry | None, needed: int, level: int) -> _Line | None:
        name = self._lengths.best()
        child = self._children[name]
        if newcomer is None or name == newcomer.client[level]:
            return child.longest(newcomer, needed, level + 1)
        own = self._children.get(newcomer.client[level])
        length = (own.size if own is not None else 0) + newcomer.size
        if child.size >= length + needed:
            return child.longest(None, needed, level + 1)
        return own.longest(newcomer, needed, level + 1) if own is not None else None

    def _update(self, name: str) -> None:
        child = self._children[name]
        if child.size:
            self._tags.put(name, self._since[name] + child.next_cost)
            self._lengths.put(name, -child.size)
        else:
            del self._children[name], self._since[name]
            self._tags.discard(name)
            self._lengths.discard(name)


class _Ranking(Generic[K]):
    """Keys by rank, the lowest first, ties by age: a heap whose stale entries are skipped, and swept in time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, K]] = []
        self._current: dict[K, tuple[int, int, K]] = {}
        self._ages = count()

    def put(self, key: K, rank: int) -> None:
        before = self._current.get(key)
        if before is not None and before[0] == rank:
            return
        self._current[key] = item = (rank, next(self._ages), key)
        heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._current.pop(key, None)

    def best(self) -> K:
        """The key of the lowest rank. There must be one."""
        while self._current.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]
