"""A server under open-loop load, simulated around a real `AdmissionQueue` on a virtual clock."""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from serve_app.core.admission_queue import AdmissionQueue
from serve_app.core.fair_queue import Entry
from serve_app.errors import OverloadedError


class _Request(Entry):
    __slots__ = ("arrived_at",)

    def __init__(self, client: str, cost: int, arrived_at: float) -> None:
        super().__init__((client, ""), cost)
        self.arrived_at = arrived_at


@dataclass
class SimulatedServer:
    """`slots` servers with exponential service times; Poisson arrivals of requests.

    A part of the refused clients comes back after `Retry-After` and up to `late_s` more, until it
    is admitted.
    """

    slots: int
    max_queued: int
    service_s: float
    seed: int = 0
    late_s: float = 0.2
    return_part: float = 1.0
    now: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    retry_after_s: list[float] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: Counter[str] = field(default_factory=Counter)
    idle_slot_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue: AdmissionQueue[_Request] = AdmissionQueue(self.slots, self.max_queued)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    @property
    def capacity(self) -> float:
        """Sequences per second."""
        return self.slots / self.service_s

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def arrive(self, client: str, cost: int = 1) -> None:
        """One request of `client` comes now."""
        request = _Request(client, cost, self.now)
        try:
            evicted = self.queue.add(request, self.now + 1e9, self.now)
        except OverloadedError as refusal:
            evicted = [(request, refusal)]
        for other, refusal in evicted:
            self._refused(other, refusal)
        self._admit()

    def arrivals(self, client: str, rate: float, until: float, cost: int = 1) -> None:
        """Newcomers of `client`, `rate` sequences per second."""

        def arrive() -> None:
            self.arrive(client, cost)
            self.arrivals(client, rate, until, cost)

        when = self.now + self.random.expovariate(rate / cost)
        if when < until:
            self.at(when, arrive)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            time, _, event = heapq.heappop(self._events)
            self.idle_slot_s += max(self.slots - self.queue.ongoing, 0) * (time - self.now)
            self.now = time
            event()
            assert not (self.queue.queued and self.queue.ongoing < self.queue.max_ongoing), "a slot idles"
        self.now = until

    def _admit(self) -> None:
        for request in self.queue.admit(self.now):
            self.waits[request.client[0]].append(self.now - request.arrived_at)
            self.at(self.now + self.random.expovariate(1 / self.service_s), lambda request=request: self._end(request))

    def _end(self, request: _Request) -> None:
        self.ended[request.client[0]] += request.cost
        self.queue.end(request, self.now)
        self._admit()

    def _refused(self, request: _Request, refusal: OverloadedError) -> None:
        assert refusal.retry_after_s is not None
        client, cost = request.client[0], request.cost
        self.refused[client] += 1
        self.retry_after_s.append(refusal.retry_after_s)
        if self.random.random() < self.return_part:
            late = self.random.uniform(0.01, self.late_s)
            self.at(self.now + refusal.retry_after_s + late, lambda: self.arrive(client, cost))
