from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def name(blocks: list[Block]) -> None:
    for block in blocks:
        block.hash = str(block.id).encode()


def test_worthless_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=6)
    cached, worthless, _ = pool.allocate(2), pool.allocate(1), pool.allocate(2)
    name(cached)
    pool.free(cached)
    pool.free(worthless)
    assert ids(pool.allocate(3)) == [3, 2, 1]


def test_never_used_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=6)
    cached = pool.allocate(2)
    name(cached)
    pool.free(cached)
    assert ids(pool.allocate(3)) == [3, 4, 5]


def test_prefixes_leave_least_recently_used_first_and_from_the_tail() -> None:
    pool = BlockPool(num_blocks=9)
    old, young = pool.allocate(4), pool.allocate(4)
    name(old[:3] + young)
    pool.free(old)
    pool.free(young)
    # First the block without a name, then the older chain from its tail, then the younger one.
    assert ids(pool.allocate(8)) == [4, 3, 2, 1, 8, 7, 6, 5]


def test_what_is_shared_again_is_evicted_last() -> None:
    pool = BlockPool(num_blocks=5)
    old, young = pool.allocate(2), pool.allocate(2)
    name(old + young)
    pool.free(old)
    pool.free(young)
    for block in old:
        pool.share(block)
    pool.free(old)
    assert ids(pool.allocate(4)) == [4, 3, 2, 1]


def test_a_shared_block_is_free_when_the_last_table_lets_go() -> None:
    pool = BlockPool(num_blocks=3)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_a_cached_free_block_can_be_revived_from_the_middle_of_the_list() -> None:
    pool = BlockPool(num_blocks=4)
    blocks = pool.allocate(3)
    name(blocks)
    pool.free(blocks)
    pool.share(blocks[1])
    pool.check_invariants([[blocks[1]]])
    assert (pool.num_free, pool.num_free_cached) == (2, 2)


@given(st.lists(st.tuples(st.sampled_from(["new", "grow", "free", "share", "name"]), st.integers(0, 99)), max_size=60))
def test_blocks_are_conserved(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks=12)
    tables: list[list[Block]] = []
    for action, number in actions:
        table = tables[number % len(tables)] if tables else None
        if action == "new" and pool.num_free > number % 4:
            tables.append(pool.allocate(number % 4 + 1))
        elif action == "grow" and table and pool.num_free:
            table += pool.allocate(1)
        elif action == "free" and table:
            tables.remove(table)
            pool.free(table)
        elif action == "share" and table:
            for block in table:
                pool.share(block)
            tables.append(list(table))
        elif action == "name" and table:
            name(table)
        pool.check_invariants(tables)
        assert all(block.id != 0 for table in tables for block in table)
