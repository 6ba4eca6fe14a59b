"""Decides which request is served next, and which is dropped. Clients take turns.

Decides an order only: no clock, no limit. Fair between tenants by weight, then between the users of
a tenant, by hierarchical self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing
Scheme for Broadband Applications", INFOCOM 1994): a client's next request is tagged with the
level's clock plus its cost divided by the client's weight; the lowest tag is served, and sets the
clock. A returning client has neither debt nor credit, and a tag is overtaken at most once per other
client and unit of cost. All operations are O(log clients).
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from serve_app.core.keyed_heap import KeyedHeap


@dataclass(eq=False, slots=True)
class Entry:
    """A waiting request with `remaining` parts, served one by one, each of `cost` sequences.

    client: (tenant, user). priority: the lowest is served first. weight: the tenant's share,
    relative to other tenants'.
    """

    client: tuple[str, str]
    cost: int = 1
    remaining: int = 1
    priority: int = 0
    weight: int = 1
    started: bool = field(default=False, init=False)

    @property
    def size(self) -> int:
        """Number of waiting sequences."""
        return self.cost * self.remaining


E = TypeVar("E", bound=Entry)


class _Queue(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def next_cost(self) -> int: ...


Q = TypeVar("Q", bound=_Queue)


class FairQueue(Generic[E]):
    """Serves the lowest priority number first. Within a priority, clients take turns."""

    def __init__(self) -> None:
        self.size = 0
        self._classes: dict[int, _PriorityClass[E]] = {}
        self._best: KeyedHeap[int, int] = KeyedHeap()
        self._worst: KeyedHeap[int, int] = KeyedHeap()

    def add(self, entry: E) -> None:
        """Append the entry to its client's queue."""
        if entry.priority not in self._classes:
            self._classes[entry.priority] = _PriorityClass()
            self._best.put(entry.priority, entry.priority)
            self._worst.put(entry.priority, -entry.priority)
        self._classes[entry.priority].add(entry)
        self.size += entry.size

    def take(self) -> E:
        """Serve one part of the next entry. Raises `LookupError` if the queue is empty."""
        priority = self._best.first()
        if priority is None:
            raise LookupError("the queue is empty")
        entry = self._classes[priority].take()
        self._shrink(priority, entry.cost)
        return entry

    def drop(self, entry: E, parts: int) -> None:
        """Remove `parts` parts of a waiting entry."""
        self._classes[entry.priority].drop(entry, parts)
        self._shrink(entry.priority, parts * entry.cost)

    def ahead_of(self, entry: E) -> int:
        """Return the sequences served before the last one of `entry`, if it were added now.

        An upper estimate.
        """
        ahead = sum(others.size for priority, others in self._classes.items() if priority < entry.priority)
        same = self._classes.get(entry.priority)
        return ahead if same is None else ahead + same.ahead_of(entry)

    def giving_way(self, entry: E, needed: int) -> list[E]:
        """Return the entries that `entry`, not yet added, may displace to gain `needed` sequences.

        May be empty. The longest queue of the lowest priority loses its newest entries, as long as
        it stays at least as long as the new entry's queue (of tenants, by weight). Queues of better
        priority lose none. Partly served entries stay.
        """
        worst = self._worst.first()
        if worst is None or worst < entry.priority:
            return []
        line = self._classes[worst].giving_way(entry if worst == entry.priority else None, needed)
        return line.newest(needed) if line is not None else []

    def _shrink(self, priority: int, sequences: int) -> None:
        self.size -= sequences
        if not self._classes[priority].size:
            del self._classes[priority]
            self._best.discard(priority)
            self._worst.discard(priority)


class _Line(Generic[E]):
    """One client's entries, first come first served."""

    def __init__(self) -> None:
        self.size = 0
        self._entries: OrderedDict[E, None] = OrderedDict()
        self._untouched: OrderedDict[E, None] = OrderedDict()

    @property
    def next_cost(self) -> int:
        return next(iter(self._entries)).cost

    def add(self, entry: E) -> None:
        self._entries[entry] = self._untouched[entry] = None
        self.size += entry.size

    def take(self) -> E:
        entry = next(iter(self._entries))
        entry.started = True
        self._untouched.pop(entry, None)
        self.drop(entry, 1)
        return entry

    def drop(self, entry: E, parts: int) -> None:
        self.size -= parts * entry.cost
        entry.remaining -= parts
        if not entry.remaining:
            del self._entries[entry]
            self._untouched.pop(entry, None)

    def newest(self, needed: int) -> list[E]:
        """Return the newest entries with at least `needed` sequences; empty if there are too few.

        Entries that are partly served do not count.
        """
        found: list[E] = []
        for entry in reversed(self._untouched):
            found.append(entry)
            needed -= entry.size
            if needed <= 0:
                return found
        return []


class _Turns(Generic[Q]):
    """Non-empty queues by name, which take turns. Call `update` after every change of a queue."""

    def __init__(self, make: Callable[[], Q]) -> None:
        self.size = 0
        self._make = make
        self._clock = 0.0
        self._weight = 0
        self._queues: dict[str, Q] = {}
        self._weights: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._tags: KeyedHeap[str, float] = KeyedHeap()
        self._lengths: KeyedHeap[str, float] = KeyedHeap()

    @property
    def next_cost(self) -> int:
        return self._queues[self._next_name()].next_cost

    def open(self, name: str, weight: int = 1) -> Q:
        """Return the queue `name`, creating it if needed.

        A new queue starts at the clock and keeps `weight` until it is empty.
        """
        if name not in self._queues:
            self._queues[name] = self._make()
            self._weights[name] = weight
            self._weight += weight
            self._since[name] = self._clock
        return self._queues[name]

    def get(self, name: str) -> Q | None:
        return self._queues.get(name)

    def begin_turn(self) -> Q:
        """Return the queue whose turn it is, and end its turn: its tag becomes the clock."""
        name = self._next_name()
        self._clock = self._since[name] = self._tag(name)
        return self._queues[name]

    def update(self, name: str, change: int) -> None:
        """Update the queue `name` after it has grown by `change` sequences."""
        self.size += change
        queue = self._queues[name]
        if queue.size:
            self._tags.put(name, self._tag(name))
            self._lengths.put(name, -queue.size / self._weights[name])
        else:
            self._weight -= self._weights.pop(name)
            del self._queues[name], self._since[name]
            self._tags.discard(name)
            self._lengths.discard(name)

    def ahead_of(self, name: str, ahead: int, size: int, weight: int = 1) -> int:
        """Return the sequences served before the last of `size` that join queue `name` now.

        `ahead`: sequences of the same queue before them. `weight` is used if the queue is new.
        """
        own = self._queues.get(name)
        weight = self._weights.get(name, weight)
        others = self._weight - (weight if own is not None else 0)
        # While these are served, each other queue is served in proportion to its weight, or
        # completely.
        most = math.ceil((ahead + size) * others / weight)
        return ahead + min(self.size - (own.size if own is not None else 0), most)

    def longest(self) -> Q:
        """Return the longest queue. There must be one."""
        name = self._lengths.first()
        assert name is not None
        return self._queues[name]

    def giving_way(self, name: str, length: int, weight: int = 1) -> Q | None:
        """Return the queue that gives way to `length` more sequences in queue `name`.

        This is the longest queue, unless `name` would become longer; then it is `name` itself.
        Lengths are divided by weights.
        """
        own, longest = self._queues.get(name), self._lengths.first()
        assert longest is not None
        own_length = ((own.size if own is not None else 0) + length) / self._weights.get(name, weight)
        gives = longest != name and self._queues[longest].size / self._weights[longest] >= own_length
        return self._queues[longest] if gives else own

    def _tag(self, name: str) -> float:
        return self._since[name] + self._queues[name].next_cost / self._weights[name]

    def _next_name(self) -> str:
        name = self._tags.first()
        assert name is not None
        return name


class _PriorityClass(Generic[E]):
    """The entries of one priority. Tenants take turns, and within a tenant its users do."""

    def __init__(self) -> None:
        self._tenants: _Turns[_Turns[_Line[E]]] = _Turns(lambda: _Turns(_Line))

    @property
    def size(self) -> int:
        return self._tenants.size

    def add(self, entry: E) -> None:
        tenant, user = entry.client
        users = self._tenants.open(tenant, entry.weight)
        users.open(user).add(entry)
        self._update(entry, entry.size)

    def take(self) -> E:
        entry = self._tenants.begin_turn().begin_turn().take()
        self._update(entry, -entry.cost)
        return entry

    def drop(self, entry: E, parts: int) -> None:
        tenant, user = entry.client
        self._tenants.open(tenant).open(user).drop(entry, parts)
        self._update(entry, -parts * entry.cost)

    def ahead_of(self, entry: E) -> int:
        tenant, user = entry.client
        ahead = 0
        if (users := self._tenants.get(tenant)) is not None:
            line = users.get(user)
            ahead = users.ahead_of(user, line.size if line is not None else 0, entry.size)
        return self._tenants.ahead_of(tenant, ahead, entry.size, entry.weight)

    def giving_way(self, newcomer: E | None, needed: int) -> _Line[E] | None:
        """Return the longest queue; None if the new entry's queue would become longer.

        Without a new entry, returns the longest queue.
        """
        if newcomer is None:
            return self._tenants.longest().longest()
        tenant, user = newcomer.client
        users = self._tenants.giving_way(tenant, newcomer.size + needed, newcomer.weight)
        if users is None:
            return None
        if users is not self._tenants.get(tenant):
            return users.longest()
        line = users.giving_way(user, newcomer.size + needed)
        return line if line is not users.get(user) else None

    def _update(self, entry: E, change: int) -> None:
        tenant, user = entry.client
        self._tenants.open(tenant).update(user, change)
        self._tenants.update(tenant, change)
