"""The routing policy: where requests go, what it learns, what it never does. No Ray."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.prefix_cache import hash_block, root_hash
from serve_app.fleet import prefix_routing
from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.prefix_routing import PrefixIndex, PrefixRouting
from serve_app.fleet.routing_policy import Placement, ReplicaInfo, RoutingRequest
from tests.examples import examples
from tests.fleet.simulated_fleet import Ours, PowerOfTwo, SimulatedFleet, prefix_groups

BLOCK, SLOTS = 4, 16
INFO = ReplicaInfo(block_size=BLOCK, num_blocks=4096, max_num_seqs=SLOTS)


@dataclass(frozen=True, slots=True)
class Named(RoutingRequest):
    """With a name by which a test speaks of it."""

    name: str = ""


class Policy(PrefixRouting):
    """Its placements by the names of their requests."""

    def __init__(self) -> None:
        super().__init__()
        self._placements: dict[str, Placement] = {}

    def routed(self, what: Named, replica: str) -> None:
        self._placements[what.name] = self.place(what, replica)

    def started(self, name: str, num_cached_tokens: int) -> None:
        self._placements[name].started(num_cached_tokens)

    def ended(self, name: str) -> None:
        self._placements[name].ended()


def fleet(*names: str, info: ReplicaInfo = INFO) -> Policy:
    policy = Policy()
    policy.update(dict.fromkeys(names, info))
    return policy


def request(
    name: str,
    prompt: Iterable[int],
    prior: Iterable[int] = (),
    *,
    session: str | None = None,
    cache_salt: str = "",
    num_sequences: int = 1,
    reads_cache: bool = True,
) -> Named:
    ids = list(prompt)
    return Named([*ids, *prior], len(ids), num_sequences, cache_salt, session, reads_cache, name=name)


def load(*, running: int = 0, waiting: int = 0, free_blocks: int = 1000, at: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(running, waiting, free_blocks, 1024, step=1, step_age_s=None, at=at)


def send(policy: Policy, what: Named, candidates: Iterable[str], now: float = 0.0) -> str:
    """Route it as the router does."""
    best = policy.rank(what, candidates, {}, now)[0]
    policy.routed(what, best)
    return best


def serve(policy: Policy, what: Named, replica: str) -> None:
    """A whole life at `replica`, whose engine finds everything that it was sent before."""
    policy.routed(what, replica)
    policy.started(what.name, (what.num_prompt_tokens - 1) // BLOCK * BLOCK)
    policy.ended(what.name)


def prefix(number: int, length: int = 512) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


# --------------------------------------------------------------------------------------------------
# ranks
NAMES = ["a", "b", "c", "d"]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["routed", "started", "ended"]), st.integers(0, 5), st.sampled_from(NAMES)), max_size=40
)


@settings(max_examples=examples(50))
@given(
    operations=OPERATIONS,
    candidates=st.lists(st.sampled_from(NAMES), unique=True),
    loads=st.dictionaries(
        st.sampled_from([*NAMES, "unknown"]), st.builds(load, running=st.integers(0, 40), at=st.floats(-9, 0))
    ),
    session=st.none() | st.sampled_from(["s", "t"]),
)
def test_ranks_hold_every_candidate_once(
    operations: list[tuple[str, int, str]],
    candidates: list[str],
    loads: Mapping[str, ReplicaLoad],
    session: str | None,
) -> None:
    policy = fleet(*NAMES)
    for action, number, name in operations:
        what = request(str(number), prefix(number % 3, 30), session="s" if number % 2 else None)
        match action:
            case "routed":
                policy.routed(what, name)
            case "started" if what.name in policy._placements:
                policy.started(what.name, 0)
            case "ended" if what.name in policy._placements:
                policy.ended(what.name)
    ranked = policy.rank(request("new", prefix(1, 30), session=session), candidates, loads, 0.0)
    assert sorted(ranked) == sorted(candidates)


@settings(max_examples=examples(50))
@given(favourite=st.sampled_from(NAMES))
def test_every_replica_can_be_the_best(favourite: str) -> None:
    policy = fleet(*NAMES)
    serve(policy, request("1", prefix(1)), favourite)
    assert policy.rank(request("2", prefix(1)), NAMES, {}, 0.0)[0] == favourite


def test_a_replica_that_left_is_not_offered_and_one_that_returns_is() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1)), "a")
    policy.update({"b": INFO})
    assert policy.rank(request("2", prefix(1)), ["a", "b"], {}, 0.0) == ["b"]
    policy.update({"a": INFO, "b": INFO})
    serve(policy, request("4", prefix(2)), "b")
    assert policy.rank(request("5", prefix(1)), ["a", "b"], {}, 0.0) == ["a", "b"], "it holds nothing, nor does b"


def test_a_replica_that_left_for_a_moment_keeps_its_attempts_and_its_prefixes() -> None:
    policy = fleet("a", "b")
    policy.routed(request("1", prefix(1)), "b")
    policy.update({"a": INFO})
    policy.update({"a": INFO, "b": INFO})
    assert policy.rank(request("2", prefix(1)), ["a", "b"], {}, 0.0) == ["b", "a"]
    assert policy.rank(request("2", prefix(2)), ["b", "a"], {}, 0.0) == ["a", "b"]


# --------------------------------------------------------------------------------------------------
# prefixes
def test_prefixes_are_named_as_the_engine_names_them() -> None:
    what = request("1", range(11), cache_salt="tenant")
    first = hash_block(root_hash("tenant"), range(4))
    assert what.block_hashes(4) == [first, hash_block(first, range(4, 8))]


def test_the_longest_cached_prefix_wins_when_loads_are_equal() -> None:
    policy = fleet("a", "b", "c")
    shared = prefix(1)
    serve(policy, request("1", shared[:100]), "a")
    serve(policy, request("2", shared[:300]), "b")
    serve(policy, request("3", prefix(2)), "c")
    assert policy.rank(request("4", shared), "abc", {}, 0.0)[:2] == ["b", "a"]


def test_another_salt_shares_nothing() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1), cache_salt="x"), "a")
    assert policy.rank(request("2", prefix(1), cache_salt="y"), "ab", {}, 0.0)[0] == "b", "equals take turns"
    assert policy.rank(request("2", prefix(1), cache_salt="x"), "ab", {}, 0.0)[0] == "a"


def test_a_request_that_was_cut_off_finds_its_output_too() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1.0", prefix(1, 40)), "a")
    serve(policy, request("2.0", prefix(1, 40), prior=range(200)), "b")
    assert policy.rank(request("3.0", prefix(1, 40), prior=range(200)), "ab", {}, 0.0)[0] == "b"


def test_prompts_whose_every_token_must_be_computed_follow_no_prefix() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1)), "a")
    assert policy.rank(request("2", prefix(1), reads_cache=False), "ab", {}, 0.0)[0] == "b"


def test_a_replica_without_prefix_cache_attracts_nothing() -> None:
    policy = fleet("a", "b", info=ReplicaInfo(BLOCK, num_blocks=0, max_num_seqs=SLOTS))
    serve(policy, request("1", prefix(1)), "a")
    assert policy.rank(request("2", prefix(1)), "ab", {}, 0.0)[0] == "b"


@settings(max_examples=examples(50))
@given(numbers=st.lists(st.integers(0, 30), max_size=60), max_blocks=st.integers(0, 20))
def test_an_index_is_bounded_and_keeps_whole_chains_of_recent_use(numbers: list[int], max_blocks: int) -> None:
    index = PrefixIndex(max_blocks)
    for number in numbers:
        hashes = request("x", prefix(number, 5 * BLOCK)).block_hashes(BLOCK)
        index.expect(hashes)
        assert len(index) <= max_blocks
        assert len(index.match(hashes)) == min(5, max_blocks)
        known = sum(len(index.match(request("x", prefix(n, 5 * BLOCK)).block_hashes(BLOCK))) for n in set(numbers))
        assert known == len(index), "a block is known whose beginning is not"


@settings(max_examples=examples(50))
@given(st.data())
def test_memory_is_bounded_whatever_comes(data: st.DataObject) -> None:
    policy = fleet("a", "b", info=ReplicaInfo(BLOCK, num_blocks=8, max_num_seqs=SLOTS))
    for number in range(data.draw(st.integers(0, 60))):
        send(policy, request(str(number), prefix(number, 24), session=f"s{number}"), "ab")
        policy.ended(str(number))
    assert all(len(replica.index) <= 8 for replica in policy._replicas.values())


# --------------------------------------------------------------------------------------------------
# what engines say
def test_what_the_engine_no_longer_has_is_forgotten_with_what_is_older() -> None:
    policy = fleet("a", "b")
    for number in (1, 2, 3):
        serve(policy, request(f"old-{number}", prefix(number)), "a")
    policy.routed(request("4", prefix(2)), "a")
    policy.started("4", num_cached_tokens=0)  # evicted; so must be 1, which was used before it
    policy.ended("4")
    serve(policy, request("5", prefix(9)), "b")
    expected = {1: "b", 2: "a", 3: "a"}
    # `a` was used less recently, so it would be the first of equals: only 1 tells forgotten from
    # remembered apart.
    serve(policy, request("6", prefix(8)), "a")
    assert {n: policy.rank(request("7", prefix(n)), "ab", {}, 0.0)[0] for n in expected} == expected


def test_a_prefix_that_is_still_being_computed_is_not_taken_for_evicted() -> None:
    policy = fleet("a", "b")
    serve(policy, request("old", prefix(1)), "a")
    policy.routed(request("first", prefix(2)), "a")
    policy.routed(request("second", prefix(2)), "a")
    policy.started("second", num_cached_tokens=0)
    serve(policy, request("other", prefix(9)), "b")
    for attempt in ("first", "second"):
        policy.ended(attempt)
    assert policy.rank(request("x", prefix(1)), "ab", {}, 0.0)[0] == "a"


def test_of_output_that_came_from_elsewhere_the_engine_says_nothing() -> None:
    policy = fleet("a", "b")
    serve(policy, request("old", prefix(1)), "a")
    serve(policy, request("1.0", prefix(2, 40), prior=range(200)), "a")
    policy.routed(request("2.0", prefix(2, 40), prior=range(200)), "a")
    policy.started("2.0", num_cached_tokens=36)
    policy.ended("2.0")
    serve(policy, request("other", prefix(9)), "b")
    assert policy.rank(request("x", prefix(1)), "ab", {}, 0.0)[0] == "a"


# --------------------------------------------------------------------------------------------------
# load
def test_load_wins_over_prefix_when_the_spread_is_large() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1, 200)), "a")
    for number in range(8):
        policy.routed(request(f"busy-{number}", [number]), "a")
    assert policy.rank(request("2", prefix(1, 200)), "ab", {}, 0.0)[0] == "b"
    for number in range(4):
        policy.ended(f"busy-{number}")
    assert policy.rank(request("2", prefix(1, 200)), "ab", {}, 0.0)[0] == "a"


def test_waiting_for_a_slots_costs_more_than_a_longer_step() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1, 150)), "a")
    what = request("2", prefix(1, 150))
    busy = {"a": load(running=SLOTS - 4), "b": load(running=SLOTS - 6)}
    assert policy.rank(what, "ab", busy, 0.0)[0] == "a"
    over = {"a": load(running=SLOTS, waiting=2), "b": load(running=SLOTS)}
    assert policy.rank(what, "ab", over, 0.0)[0] == "b"


def test_a_replica_that_computes_a_long_prompt_is_busier_than_one_that_generates() -> None:
    policy = fleet("a", "b")
    policy.routed(request("long", prefix(1, 2000)), "a")
    policy.routed(request("short", prefix(2, 8)), "b")
    assert policy.rank(request("x", prefix(3, 64)), "ab", {}, 0.0)[0] == "b"
    policy.started("long", 0)
    policy.routed(request("short 2", prefix(4, 8)), "b")
    assert policy.rank(request("x", prefix(3, 64)), "ab", {}, 0.0)[0] == "a"


@pytest.mark.parametrize(
    "full",
    [
        load(running=SLOTS),
        load(running=SLOTS - 4, waiting=4),
        load(free_blocks=7),
    ],
    ids=["slots taken", "others wait", "no room for the prompt"],
)
def test_no_prefix_and_no_session_leads_to_a_full_replica(full: ReplicaLoad) -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1), session="s"), "a")
    what = request("2", prefix(1) + prefix(2, 32), session="s")
    assert policy.rank(what, "ab", {"a": load()}, 0.0) == ["a", "b"]
    assert policy.rank(what, "ab", {"a": full}, 0.0) == ["b", "a"]


def test_what_needs_a_slot_goes_only_where_one_is_free() -> None:
    policy = fleet("a", "b")
    moved = replace(request("moved", prefix(1)), needs_slot=True)
    whole = replace(moved, num_sequences=SLOTS + 1)
    full, half = load(running=SLOTS - 1, waiting=1), load(running=SLOTS // 2)
    assert policy.rank(moved, "ab", {"a": full, "b": half}, 0.0) == ["b"]
    assert policy.rank(moved, "ab", {"a": full, "b": full}, 0.0) == []
    assert policy.rank(whole, "ab", {"a": half, "b": load()}, 0.0) == ["b"], "it never has more than all"
    policy.routed(request("1", prefix(2), num_sequences=SLOTS), "b")
    assert policy.rank(moved, "b", {}, 0.0) == []
    assert policy.account("b") == {
        "sequences": SLOTS,
        "waiting_tokens": 512,
        "known_blocks": 512 // BLOCK,
        "refused_beyond": None,
    }
    assert policy.account("unknown") == {}


def test_an_old_report_of_load_keeps_nobody_away() -> None:
    policy = fleet("a", "b")
    serve(policy, request("1", prefix(1)), "a")
    busy = load(running=SLOTS, at=100.0)
    assert policy.rank(request("2", prefix(1)), "ab", {"a": busy}, 101.0)[0] == "b"
    assert policy.rank(request("2", prefix(1)), "ab", {"a": busy}, 130.0)[0] == "a"


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1000), count=st.integers(2, 5))
def test_unlike_prompts_go_where_the_fewest_are_also_to_a_new_replica(seed: int, count: int) -> None:
    rng, names = Random(seed), [f"r{i}" for i in range(count)]
    policy = fleet(*names)
    at: dict[str, str] = {}
    placed: Counter[str] = Counter()
    for number in range(200):
        if number == 100:
            names.append("new")
            policy.update(dict.fromkeys(names, INFO))
            placed.clear()
        there = Counter(at.values())
        where = send(policy, request(str(number), prefix(number, 40)), names)
        policy.started(str(number), 0)
        assert there[where] == min(there[name] for name in names)
        placed[where] += 1
        at[str(number)] = where
        if len(at) > 2 * count:
            ended = rng.choice(list(at))
            policy.ended(ended)
            del at[ended]
    assert len(placed) == len(names)


def test_shared_prefixes_land_together_and_spread_over_the_fleet() -> None:
    policy, names = fleet("a", "b", "c"), "abc"
    arrivals = [number for number in range(24) for _ in range(4)]
    Random(3).shuffle(arrivals)
    homes: dict[int, set[str]] = {}
    placed: Counter[str] = Counter()
    running: list[str] = []
    for i, number in enumerate(arrivals):
        where = send(policy, request(str(i), prefix(number) + [i]), names)
        policy.started(str(i), 512)
        homes.setdefault(number, set()).add(where)
        placed[where] += 1
        running.append(str(i))
        if len(running) > 12:
            policy.ended(running.pop(0))
    assert all(len(where) == 1 for where in homes.values())
    assert min(placed.values()) >= 96 / 3 * 0.75, placed


def test_one_hot_prefix_does_not_pile_up_on_one_replica() -> None:
    policy = fleet("a", "b", "c")
    placed = Counter(send(policy, request(str(i), prefix(1)), "abc") for i in range(36))
    assert max(placed.values()) <= 20
    assert len(placed) == 3


# --------------------------------------------------------------------------------------------------
# sessions
def test_a_session_stays_and_moves_when_its_replica_is_gone() -> None:
    policy = fleet("a", "b", "c")
    homes = {send(policy, request(f"1-{s}", prefix(s, 8), session=f"s{s}"), "abc"): f"s{s}" for s in range(3)}
    assert set(homes) == {"a", "b", "c"}
    for home, session in homes.items():
        assert policy.rank(request("2", prefix(7, 400), session=session), "abc", {}, 0.0)[0] == home
    policy.update({"b": INFO, "c": INFO})
    moved = send(policy, request("3", prefix(7, 400), session=homes["a"]), "bc")
    policy.update(dict.fromkeys("abc", INFO))
    assert policy.rank(request("4", prefix(8, 400), session=homes["a"]), "abc", {}, 0.0)[0] == moved


def test_the_sessions_least_recently_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_routing, "_MAX_SESSIONS", 2)
    policy = fleet("a", "b")
    for i, session in enumerate(["s", "t", "s", "u"]):
        policy.routed(request(str(i), prefix(i, 8), session=session), "b")
        policy.ended(str(i))
    best = {s: policy.rank(request("x", prefix(9, 8), session=s), "ab", {}, 0.0)[0] for s in "stu"}
    assert best == {"s": "b", "t": "a", "u": "b"}


# --------------------------------------------------------------------------------------------------
# accounts
def test_an_attempt_counts_where_it_was_sent_and_not_after_its_end() -> None:
    policy = fleet("a", "b")
    what = request("1", prefix(1, 80), num_sequences=3)
    policy.routed(what, "b")
    accounts = {name: (r.sequences, r.waiting_tokens) for name, r in policy._replicas.items()}
    assert accounts == {"a": (0, 0), "b": (3, 80)}
    for _ in range(2):
        policy.started("1", 0)
        assert policy._replicas["b"].waiting_tokens == 0
    for _ in range(2):
        policy.ended("1")
    policy.started("1", 5)
    assert {name: (r.sequences, r.waiting_tokens) for name, r in policy._replicas.items()} == dict.fromkeys(
        "ab", (0, 0)
    )


# --------------------------------------------------------------------------------------------------
# the whole
@pytest.mark.parametrize("concurrency", [6, 12, 48])
def test_shared_prefixes_hit_half_as_often_again_as_by_power_of_two_and_answer_sooner(concurrency: int) -> None:
    """Real schedulers in virtual time: what `load_tests.bench.routing` measures on real ones."""
    names = ["a", "b", "c"]
    prompts = prefix_groups(Random(1))
    ours, other = SimulatedFleet(names, Ours(names)), SimulatedFleet(names, PowerOfTwo(Random(2)))
    for simulated in (ours, other):
        simulated.serve(prompts, concurrency)
    assert ours.hit_rate > 1.5 * other.hit_rate
    assert ours.mean_ttft_s < other.mean_ttft_s
    assert ours.seconds < other.seconds
