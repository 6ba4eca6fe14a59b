"""When a refused client should come back, and the place that is kept for it then.

Decides return times and how many places newcomers must leave alone; who is served when is the queue's. Pure: time is
an argument. A refusal is a promise: the n-th refused request is told the time at which n more places will have become
free, at the rate at which they do; about that time a place is kept for it. A promise that is not redeemed lapses.
"""

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_PROMISED = 65_536
"""Sequences promised at a time, which bounds memory (about 300 bytes each)."""
MAX_WAIT_S = 3600.0
_SPACING = 1.1
"""Return times leave a tenth of the places to newcomers, so that chance or a wrong rate breaks few promises."""
_SPREAD_S = 10.0
"""Return times are whole seconds, so a burst of refusals would come back as bursts: they are spread over so much."""
_LEAD_S = 10.0
_LEAD_PLACES = 16
"""Newcomers leave alone what is due within so many seconds, or until so many places are free: room for returns that
come in bunches."""
_GRACE_S = 15.0
"""A promise lapses so long after its return time."""
_ENOUGH = 8
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(slots=True, eq=False)
class _Promise:
    due: float
    number: int
    cost: int
    client: Hashable
    identity: bytes
    kept: bool = field(default=False)

    def __lt__(self, other: "_Promise") -> bool:
        return (self.due, self.number) < (other.due, other.number)


class PromiseBook:
    """Outstanding promises by identity (who asks for what). Making and redeeming one is O(log n)."""

    def __init__(self, max_promised: int = MAX_PROMISED) -> None:
        self._max_promised = max_promised
        self._by_identity: dict[bytes, list[_Promise]] = {}
        self._by_client: dict[Hashable, int] = {}
        self._later: list[_Promise] = []
        self._near: list[_Promise] = []
        self._held = 0
        self._lead_s = _LEAD_S
        self.outstanding = 0
        self.made = self.redeemed = self.lapsed = 0

    def make(self, client: Hashable, identity: bytes, cost: int, missing: int, rate: float, now: float) -> float:
        """Promise `cost` places; returns in how many (whole) seconds, or infinity if that would be too many.

        missing: places that should become free before the first return. rate: places that become free per second.
        """
        self._lead_s = max(_LEAD_S, _LEAD_PLACES / rate)
        self._advance(now)
        own = self._by_client.get(client, 0) + cost
        clients = len(self._by_client) + (own == cost)
        # Clients with promises take turns: the others have as much returned meanwhile, or all they were promised.
        ahead = min(self.outstanding + cost, own * clients) + missing
        after = min(ahead * _SPACING / rate, 2 * MAX_WAIT_S)
        # Multiples of the golden ratio: even over any stretch, and the same in every run.
        after += min(after, _SPREAD_S) * (self.made * _GOLDEN % 1)
        wait = float(max(1, math.ceil(after)))
        # A client leaves as much room as it takes (the dynamic thresholds of shared switch buffers).
        if wait > MAX_WAIT_S or own > self._max_promised - self.outstanding:
            return math.inf
        promise = _Promise(now + wait, self.made, cost, client, identity)
        heapq.heappush(self._by_identity.setdefault(identity, []), promise)
        heapq.heappush(self._later, promise)
        self._by_client[client] = own
        self.outstanding += cost
        self.made += 1
        return wait

    def redeem(self, identity: bytes, now: float) -> bool:
        """Whether a promise to `identity` is due; it is used up."""
        self._advance(now)
        promises = self._by_identity.get(identity)
        if not promises or promises[0].due > now:
            return False
        promises[0].kept = True
        self._held -= promises[0].cost
        self._forget(promises[0])
        self.redeemed += 1
        return True

    def held(self, now: float) -> int:
        """Places that newcomers must leave to promises which are due now or soon."""
        self._advance(now)
        return self._held

    def _advance(self, now: float) -> None:
        while self._later and self._later[0].due <= now + self._lead_s:
            promise = heapq.heappop(self._later)
            heapq.heappush(self._near, promise)
            self._held += promise.cost
        while self._near and (self._near[0].kept or self._near[0].due + _GRACE_S < now):
            promise = heapq.heappop(self._near)
            if not promise.kept:
                self._held -= promise.cost
                self._forget(promise)
                self.lapsed += 1

    def _forget(self, promise: _Promise) -> None:
        """Promises end in the order of their return times, so it is its identity's first."""
        promises = self._by_identity[promise.identity]
        heapq.heappop(promises)
        if not promises:
            del self._by_identity[promise.identity]
        self.outstanding -= promise.cost
        self._by_client[promise.client] -= promise.cost
        if not self._by_client[promise.client]:
            del self._by_client[promise.client]


class ServiceRate:
    """How fast a place becomes free again, measured while all places are taken: only then it says what overload brings.

    Places times seconds, and the sequences that ended in them, both fading with the sequences that end after them.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._place_s = 0.0
        self._places = 0
        self._at = 0.0

    def taken(self, places: int, now: float) -> None:
        """From now on all of this many places are taken; 0: some place is free."""
        self._advance(now)
        self._places = places

    def ended(self, cost: int, now: float) -> None:
        """Sequences ended, before their places count as free."""
        self._advance(now)
        if self._places:
            fading = 1.0 - 1.0 / max(256, 4 * self._places)
            self._ended = self._ended * fading + cost
            self._place_s *= fading

    @property
    def known(self) -> bool:
        """Whether enough has ended to believe it."""
        return self._ended >= _ENOUGH

    def per_place(self, now: float) -> float:
        """Sequences per second and place; one while there is nothing to measure."""
        self._advance(now)
        measured = (self._ended + 1.0) / (self._place_s + 1.0)
        if self.known or not self._places:
            return measured
        # Nobody has ended yet, or hardly: take those who run to be half through.
        return max(measured, 1.0 / (1.0 + 2.0 * self._place_s / self._places))

    def _advance(self, now: float) -> None:
        self._place_s += self._places * (now - self._at)
        self._at = now
