"""The requests that wait for a slot in order of service, and the choice of the one to preempt.

The admission gate decides when a request may start.
"""

import math
from collections import OrderedDict
from itertools import islice

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.request import Request


class _OrderedQueue:
    """Requests by `order` and by arrival. Removal at any position is cheap."""

    def __init__(self) -> None:
        self._members: OrderedDict[Request, None] = OrderedDict()
        self._by_order: KeyedHeap[Request, tuple[int, int, int]] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        self._members[request] = None
        self._by_order.put(request, request.order)

    def remove(self, request: Request) -> None:
        del self._members[request]
        self._by_order.discard(request)

    def head(self) -> Request | None:
        return self._by_order.first()

    def oldest(self) -> Request | None:
        return next(iter(self._members), None)

    def newest(self) -> Request | None:
        return next(reversed(self._members), None)

    def nth(self, n: int) -> Request:
        """Return the `n`-th request by arrival, counted from 1."""
        return next(islice(self._members, n - 1, n))


class RequestQueue:
    """Waiting requests in order of service. New and resuming requests are separate.

    Only new requests need the admission gate. Resuming requests (preempted ones, and further
    choices of a running request) were admitted before. They precede new requests of their priority:
    preemption takes the youngest request, so they arrived earlier.
    """

    def __init__(self) -> None:
        self._new = _OrderedQueue()
        self._resuming = _OrderedQueue()

    def __len__(self) -> int:
        return len(self._new) + len(self._resuming)

    def __contains__(self, request: Request) -> bool:
        return request in self._new or request in self._resuming

    @property
    def num_new(self) -> int:
        """Number of new requests."""
        return len(self._new)

    @property
    def num_resuming(self) -> int:
        """Number of requests that were admitted before."""
        return len(self._resuming)

    @property
    def new_head(self) -> Request | None:
        """The next new request; None if there is none."""
        return self._new.head()

    @property
    def oldest_arrival(self) -> float:
        """Arrival time of the oldest new request; infinity if there is none."""
        oldest = self._new.oldest()
        return math.inf if oldest is None else oldest.arrived_at

    def last_arrival(self, limit: int) -> int:
        """Return the arrival number of the newest new request, or of the `limit`-th if more wait.

        -1 if none waits.
        """
        last = self._new.nth(limit) if limit < len(self._new) else self._new.newest()
        return -1 if last is None else last.arrival

    def push(self, request: Request, *, resuming: bool) -> None:
        """Enqueue by `request.order`."""
        (self._resuming if resuming else self._new).push(request)

    def remove(self, request: Request) -> None:
        """Remove a request at any position."""
        (self._resuming if request in self._resuming else self._new).remove(request)

    def head(self, *, gate_open: bool) -> Request | None:
        """Return the next request. None overtakes the head; a closed gate hides new requests."""
        resuming, new = self._resuming.head(), self.new_head if gate_open else None
        if resuming is None or new is None:
            return resuming or new
        return min(resuming, new, key=lambda request: request.order)


def pick_victim(running: list[Request]) -> Request:
    """Return the request to preempt: the youngest of the lowest priority.

    `running` is sorted by `order`.
    """
    return running[-1]
