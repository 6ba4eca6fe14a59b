"""A server under open-loop load, simulated around a real `AdmissionQueue` on a virtual clock."""

import asyncio
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from serve_app.api.admission import AdmissionQueue, Caller, Ticket
from serve_app.errors import OverloadedError

_WITHIN_THE_RUN = 1e9


@dataclass
class Simulation:
    """`places` servers with exponential service times; Poisson arrivals of requests, each with a body of its own.

    A refused client comes back after its `Retry-After` and up to `late_s` more, with the same body, until it is taken.
    """

    places: int
    max_queued: int
    service_s: float
    seed: int = 0
    late_s: float = 0.2
    return_part: float = 1.0
    now: float = 0.0
    returns: Counter[bool] = field(default_factory=Counter)
    newcomers: Counter[bool] = field(default_factory=Counter)
    unpromised: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    most_promises: int = 0
    idle_place_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue = AdmissionQueue(self.places, self.max_queued, clock=lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    @property
    def capacity(self) -> float:
        """Sequences per second."""
        return self.places / self.service_s

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def arrivals(self, client: str, rate: float, until: float, cost: int = 1, number: int = 0) -> None:
        """Newcomers of `client`, `rate` sequences per second."""

        def arrive() -> None:
            self._come(Caller((client, ""), f"{client} {number}".encode()), cost, returning=False)
            self.arrivals(client, rate, until, cost, number + 1)

        when = self.now + self.random.expovariate(rate / cost)
        if when < until:
            self.at(when, arrive)

    async def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            time, _, event = heapq.heappop(self._events)
            self.idle_place_s += max(self.places - self.queue.ongoing, 0) * (time - self.now)
            self.now = time
            event()
            await asyncio.sleep(0)
            self.most_promises = max(self.most_promises, self.queue.promises.outstanding)
            assert not (self.queue.queued and self.queue.ongoing < self.queue.max_ongoing), "a place idles"
        self.now = until

    def _come(self, caller: Caller, cost: int, returning: bool) -> None:
        outcome = self.returns if returning else self.newcomers
        try:
            [ticket] = self.queue.reserve(1, cost, caller)
        except OverloadedError as refusal:
            outcome[False] += 1
            self._refused(refusal, caller, cost)
            return
        outcome[True] += 1
        ticket.turn.add_done_callback(lambda _: self._turn(ticket, caller, cost))

    def _turn(self, ticket: Ticket, caller: Caller, cost: int) -> None:
        if ticket.refusal is not None:
            self.evicted += 1
            self._refused(ticket.refusal, caller, cost)
            ticket.release()
            return

        self.waits[caller.client[0]].append(ticket.waited_s)

        def end() -> None:
            self.ended[caller.client[0]] += cost
            ticket.release()

        self.at(self.now + self.random.expovariate(1 / self.service_s), end)

    def _refused(self, refusal: OverloadedError, caller: Caller, cost: int) -> None:
        assert refusal.retry_after_s is not None
        self.refused[caller.client[0]] += 1
        if refusal.retry_after_s > _WITHIN_THE_RUN:
            self.unpromised += 1
        elif self.random.random() < self.return_part:
            late = self.random.uniform(0.01, self.late_s)
            self.at(self.now + refusal.retry_after_s + late, lambda: self._come(caller, cost, returning=True))
