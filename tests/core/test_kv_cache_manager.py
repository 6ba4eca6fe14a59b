"""Queries are pure, allocation is all or nothing, and the self-check finds every kind of damage."""

from collections.abc import Callable

import pytest

from serve_app.core.config import SchedulerConfig
from serve_app.core.kv_cache_manager import KVCacheManager, Prefix
from serve_app.core.request import EngineRequest, Request, make_choices
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from tests.core.fake_model import FakeRunner

CONFIG = SchedulerConfig(num_blocks=21, block_size=2, max_model_len=20, vocab_size=50, max_num_seqs=3)


def make_request(request_id: str, prompt: tuple[int, ...]) -> Request:
    return make_choices(EngineRequest(request_id, prompt, SamplingParams(max_tokens=4)), CONFIG, 0, 0.0)[0]


def test_match_is_a_pure_query() -> None:
    kv = KVCacheManager(CONFIG)
    first = make_request("a", (1, 2, 3, 4, 5))
    assert kv.allocate(first, kv.match(first), reserve=0)
    first.num_computed_tokens = 5
    kv.publish(first)
    kv.free(first)
    second = make_request("b", (1, 2, 3, 4, 5))
    for _ in range(2):
        prefix = kv.match(second)
        assert (prefix.num_tokens, [block.id for block in prefix.shared]) == (4, [1, 2])
        assert all(block.ref_count == 0 for block in prefix.shared)
        assert kv.pool.num_free == 20
    kv.check_invariants([])


def test_allocate_is_all_or_nothing_and_counts_revived_blocks() -> None:
    kv = KVCacheManager(CONFIG)
    first = make_request("a", (1, 2, 3, 4, 5))
    kv.allocate(first, kv.match(first), reserve=0)
    first.num_computed_tokens = 5
    kv.publish(first)
    kv.free(first)
    second = make_request("b", (1, 2, 3, 4, 5))
    # 2 free blocks are revived and 1 is new: 3 of 20 leave the free list.
    assert not kv.allocate(second, kv.match(second), reserve=18)
    assert (kv.pool.num_free, second.blocks) == (20, [])
    assert kv.allocate(second, kv.match(second), reserve=17)
    assert kv.pool.num_free == 17
    kv.check_invariants([second])


def test_making_room_never_evicts_what_is_about_to_be_shared() -> None:
    kv = KVCacheManager(SchedulerConfig(num_blocks=4, block_size=2, max_model_len=7, vocab_size=50, max_num_seqs=1))
    first = make_request("a", (1, 2, 3, 4, 5))
    kv.allocate(first, kv.match(first), reserve=0)
    first.num_computed_tokens = 4
    kv.publish(first)
    kv.free(first)
    second = make_request("b", (1, 2, 3, 4, 6))
    assert kv.allocate(second, kv.match(second), reserve=0)
    assert [block.id for block in second.blocks] == [1, 2, 3]
    kv.check_invariants([second])


def test_another_choice_shares_what_runs_rather_than_what_is_only_cached() -> None:
    kv = KVCacheManager(CONFIG)
    first = make_request("a", (1, 2, 3, 4, 5))
    kv.allocate(first, Prefix(), reserve=0)
    first.num_computed_tokens = 5
    kv.publish(first)
    kv.free(first)
    request = EngineRequest("b", (1, 2, 3, 4, 5), SamplingParams(max_tokens=4, n=2))
    leader, choice = make_choices(request, CONFIG, 0, 0.0)
    kv.allocate(leader, Prefix(), reserve=0)
    leader.num_computed_tokens = 5
    (prefix,) = kv.find_prefixes(choice)
    assert (prefix.num_tokens, prefix.shared) == (4, leader.blocks[:2])
    assert kv.allocate(choice, prefix, reserve=16)  # one new block of 17
    kv.check_invariants([leader, choice])


def test_where_a_longer_published_prefix_does_not_fit_another_choice_starts_from_its_leader() -> None:
    """The published blocks are another copy: the leader computed the same tokens at the same
    time."""
    kv = KVCacheManager(CONFIG)
    request = EngineRequest("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=4, n=2))
    leader, choice = make_choices(request, CONFIG, 0, 0.0)
    other = make_request("b", (1, 2, 3, 4, 5, 6, 7))
    for computed in (leader, other):
        kv.allocate(computed, Prefix(), reserve=0)
        computed.num_computed_tokens = computed.num_tokens
    kv.publish(other)
    kv.free(other)
    choice.append((6, 7))
    published, forked = kv.find_prefixes(choice)
    assert (published.num_tokens, forked.num_tokens) == (6, 5)
    reserve = kv.pool.num_free - 2
    assert not kv.allocate(choice, published, reserve)
    assert kv.allocate(choice, forked, reserve)
    kv.check_invariants([leader, choice])


def share_a_writable_block(scheduler: Scheduler) -> None:
    scheduler._running[1].blocks[-1] = scheduler._running[0].blocks[-1]


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler._running[0].blocks.pop()


def publish_too_early(scheduler: Scheduler) -> None:
    scheduler._kv.prefix_cache.publish(scheduler._running[0].blocks[-1], b"x")


def publish_a_wrong_name(scheduler: Scheduler) -> None:
    block = scheduler._running[0].blocks[0]
    scheduler._kv.prefix_cache.forget(block)
    scheduler._kv.prefix_cache.publish(block, b"x")


def forget_half(scheduler: Scheduler) -> None:
    scheduler._running[0].blocks[0].hash = None


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler._running[0].slot = 1


def shuffle_running(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def lose_a_waiting_request(scheduler: Scheduler) -> None:
    head = scheduler._queue.head(gate_open=True)
    assert head is not None
    scheduler._queue.remove(head)


def compute_too_much(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed_tokens += 1


def miscount(scheduler: Scheduler) -> None:
    scheduler._kv.pool.num_free += 1


@pytest.mark.parametrize(
    "damage",
    [
        share_a_writable_block,
        lose_a_block,
        publish_too_early,
        publish_a_wrong_name,
        forget_half,
        lose_a_slot,
        shuffle_running,
        lose_a_waiting_request,
        compute_too_much,
        miscount,
    ],
)
def test_the_self_check_finds(damage: Callable[[Scheduler], None]) -> None:
    scheduler = Scheduler(CONFIG)
    runner = FakeRunner(CONFIG)
    for i in range(4):
        scheduler.add(EngineRequest(f"r{i}", (i, 1, 2), SamplingParams(max_tokens=8)), 0.0)
    output = scheduler.schedule(0.0)
    scheduler.update(output, runner.execute(output))
    scheduler.check_invariants()
    damage(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check_invariants()
