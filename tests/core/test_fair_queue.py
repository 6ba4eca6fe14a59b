"""The order of service, held against what fairness promises rather than against another
implementation."""

import math
from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.admission_queue import AdmissionQueue
from serve_app.core.fair_queue import Entry, FairQueue
from serve_app.errors import OverloadedError

MAX_COST = 4
KEYS = "abc"

ARRIVAL = st.builds(
    Entry,
    client=st.tuples(st.sampled_from(KEYS), st.sampled_from(["", "x", "y"])),
    cost=st.integers(1, MAX_COST),
    remaining=st.integers(1, 3),
    priority=st.integers(0, 1),
)
STEP = st.one_of(ARRIVAL, st.just("take"), st.just("take"), st.tuples(st.just("drop"), st.integers(0, 99)))


class Lines:
    """What waits, and how much each group of clients was served while the others waited, too."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.waiting: list[Entry] = []
        self.leads: dict[tuple[int, str, str], list[int]] = {}

    def sizes(self, priority: int, level: int) -> dict[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        for entry in self.waiting:
            if entry.priority == priority:
                sizes["/".join(entry.client[: level + 1])] += entry.size
        return sizes

    def add(self, entry: Entry) -> None:
        self.queue.add(entry)
        self.waiting.append(entry)

    def drop(self, which: int) -> None:
        if self.waiting:
            entry = self.waiting[which % len(self.waiting)]
            self.queue.drop(entry, 1)
        self._settle()

    def take(self) -> None:
        if not self.waiting:
            return
        entry = self.queue.take()
        assert entry.priority == min(other.priority for other in self.waiting)
        assert entry is next(e for e in self.waiting if (e.client, e.priority) == (entry.client, entry.priority))
        self._check_fair(entry)
        self._settle()

    def _settle(self) -> None:
        self.waiting = [entry for entry in self.waiting if entry.remaining]
        assert self.queue.size == sum(entry.size for entry in self.waiting)

    def _check_fair(self, taken: Entry) -> None:
        """Over any time in which two wait, they are served alike but for one entry's cost each."""
        for priority, level in ((0, 0), (1, 0), (0, 1), (1, 1)):
            names = [*self.sizes(priority, level)]
            siblings = [pair for pair in combinations(sorted(names), 2) if level == 0 or pair[0][0] == pair[1][0]]
            pairs = {(priority, *pair) for pair in siblings}
            for pair in [p for p in self.leads if p[0] == priority and p[1].count("/") == level and p not in pairs]:
                del self.leads[pair]
            for pair in pairs:
                leads = self.leads.setdefault(pair, [0])
                name = "/".join(taken.client[: level + 1])
                change = (name == pair[1]) - (name == pair[2]) if taken.priority == priority else 0
                leads.append(leads[-1] + change * taken.cost)
                assert max(leads) - min(leads) <= 2 * MAX_COST


@given(st.lists(STEP, max_size=80))
def test_clients_take_turns_and_each_ones_requests_keep_their_order(steps: list[Entry | str | tuple[str, int]]) -> None:
    lines = Lines()
    for step in steps:
        if isinstance(step, Entry):
            lines.add(Entry(step.client, step.cost, step.remaining, step.priority))
        elif step == "take":
            lines.take()
        else:
            lines.drop(int(step[1]))
    while lines.waiting:
        lines.take()
    assert lines.queue.size == 0


@given(st.lists(ARRIVAL, max_size=40), st.lists(st.just(0), max_size=20), ARRIVAL, st.integers(1, 6))
def test_the_longest_line_gives_way_to_a_shorter_one(
    arrivals: list[Entry], served: list[int], newcomer: Entry, needed: int
) -> None:
    lines = Lines()
    for entry in arrivals:
        lines.add(Entry(entry.client, entry.cost, entry.remaining, entry.priority))
    for _ in served:
        lines.take()
    before = [entry.size for entry in lines.waiting]
    yielding = lines.queue.giving_way(newcomer, needed)
    assert [entry.size for entry in lines.waiting] == before, "asking changes nothing"
    if not yielding:
        return
    assert len({entry.client for entry in yielding}) == 1
    assert sum(entry.size for entry in yielding) >= needed > sum(entry.size for entry in yielding[:-1])
    worst = max(entry.priority for entry in lines.waiting)
    assert not any(entry.started for entry in yielding)
    assert yielding[0].priority == worst >= newcomer.priority
    line = [e for e in lines.waiting if (e.client, e.priority) == (yielding[0].client, worst) and not e.started]
    assert yielding == line[::-1][: len(yielding)]
    if worst == newcomer.priority:
        key, theirs = newcomer.client[0], yielding[0].client[0]
        level = 0 if key != theirs else 1
        sizes = lines.sizes(worst, level)
        mine = sizes["/".join(newcomer.client[: level + 1])] + newcomer.size
        assert sizes["/".join(yielding[0].client[: level + 1])] >= mine + needed


def test_a_line_of_ten_thousand_delays_another_client_by_one() -> None:
    queue = FairQueue()
    for _ in range(10_000):
        queue.add(Entry(("greedy", "")))
    for _ in range(100):
        queue.take()
    modest = Entry(("modest", ""))
    assert queue.ahead_of(modest) == 1
    queue.add(modest)
    assert modest in (queue.take(), queue.take())


def test_naming_many_users_gains_nothing() -> None:
    queue = FairQueue()
    for i in range(300):
        queue.add(Entry(("one key", f"user {i}")))
        queue.add(Entry(("another", "")))
    served = [queue.take().client[0] for _ in range(100)]
    assert served.count("one key") == 50


def test_an_expensive_request_waits_until_the_others_have_had_as_much() -> None:
    queue = FairQueue()
    queue.add(Entry(("a", ""), cost=8))
    for _ in range(20):
        queue.add(Entry(("b", "")))
    served = [queue.take().client[0] for _ in range(9)]
    assert served.index("a") in (7, 8)


def test_no_more_is_ahead_than_estimated() -> None:
    queue = FairQueue()
    for client, number in (("a", 50), ("b", 3), ("c", 20)):
        for _ in range(number):
            queue.add(Entry((client, "")))
    entry = Entry(("c", ""))
    ahead = queue.ahead_of(entry)
    queue.add(entry)
    served = 0
    while queue.take() is not entry:
        served += 1
    assert served == 20 + 21 + 3
    assert served <= ahead < 73


def test_who_comes_late_has_saved_nothing() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.add(Entry(("early", "")))
    for _ in range(100):
        queue.take()
    for _ in range(50):
        queue.add(Entry(("late", "")))
    served = [queue.take().client[0] for _ in range(20)]
    assert served.count("late") == 10


def test_a_request_of_which_a_part_was_served_does_not_give_way() -> None:
    queue = FairQueue()
    entry = Entry(("a", ""), remaining=9)
    queue.add(entry)
    assert queue.giving_way(Entry(("b", "")), 1) == [entry]
    queue.take()
    assert queue.giving_way(Entry(("b", "")), 1) == []


def test_nobody_is_served_from_an_empty_queue() -> None:
    with pytest.raises(LookupError):
        FairQueue[Entry]().take()


def test_tenants_are_served_by_their_weights() -> None:
    queue = FairQueue[Entry]()
    for _ in range(300):
        queue.add(Entry(("light", "")))
        queue.add(Entry(("heavy", ""), weight=2))
    served = [queue.take().client[0] for _ in range(300)]
    assert served.count("heavy") == 200
    assert max(served[i : i + 3].count("light") for i in range(297)) <= 2


def test_a_tenant_of_twice_the_weight_may_have_twice_as_many_waiting() -> None:
    queue = FairQueue[Entry]()
    for _ in range(10):
        queue.add(Entry(("heavy", ""), weight=2))
    assert queue.giving_way(Entry(("light", "")), 4) != [], "5 by its weight, as many as the newcomer's would be"
    assert queue.giving_way(Entry(("light", "")), 5) == []
    for _ in range(8):
        queue.add(Entry(("light", "")))
    assert queue.giving_way(Entry(("heavy", ""), weight=2), 1)[0].client[0] == "light"


def test_no_more_is_ahead_of_a_weighted_tenant_than_estimated() -> None:
    queue = FairQueue[Entry]()
    for client, weight, number in (("a", 1, 50), ("b", 3, 100), ("c", 2, 9)):
        for _ in range(number):
            queue.add(Entry((client, ""), weight=weight))
    entry = Entry(("c", ""), weight=2)
    ahead = queue.ahead_of(entry)
    queue.add(entry)
    served = 0
    while queue.take() is not entry:
        served += 1
    assert served <= ahead == 9 + 20


@pytest.mark.parametrize("num_users", [1, 400])
def test_strangers_displace_no_tenant(num_users: int) -> None:
    """400 requests of strangers, who may call themselves anything, beside 60 that a tenant has
    waiting."""
    queue: AdmissionQueue[Entry] = AdmissionQueue(32, 128)
    tenant = [Entry(("team", "")) for _ in range(60)]
    for i in range(32):
        queue.add(Entry(("", f"user {i}")), math.inf, 0.0)
        queue.admit(0.0)
    for entry in tenant:
        assert queue.add(entry, math.inf, 0.0) == []
    refused = 0
    for i in range(400):
        try:
            evicted = [other for other, _ in queue.add(Entry(("", f"user {i % num_users}")), math.inf, 0.0)]
        except OverloadedError:
            refused += 1
            continue
        assert not set(evicted) & set(tenant)
        refused += len(evicted)
    assert refused == 400 - 68
    assert sum(entry.remaining for entry in tenant) == 60
