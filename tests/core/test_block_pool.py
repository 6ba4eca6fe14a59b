from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def name(blocks: list[Block]) -> None:
    for block in blocks:
        block.hash = str(block.id).encode()


def test_tables_start_far_apart_and_grow_into_their_own_run() -> None:
    pool = BlockPool(num_blocks=13, num_tables=3)
    tables = [pool.allocate(1, room=4) for _ in range(3)]
    for _ in range(3):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert list(map(ids, tables)) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert pool.num_free == 0


def test_a_run_is_no_longer_than_the_tables_room() -> None:
    pool = BlockPool(num_blocks=13, num_tables=3)
    assert [ids(pool.allocate(1, room=2)) for _ in range(3)] == [[1], [3], [5]]


def test_a_table_larger_than_its_share_still_gets_one_run() -> None:
    pool = BlockPool(num_blocks=13, num_tables=4)
    pool.allocate(1)
    assert ids(pool.allocate(7)) == [2, 3, 4, 5, 6, 7, 8]


def test_regions_are_reused_in_turn() -> None:
    pool = BlockPool(num_blocks=7, num_tables=2)
    starts = []
    for _ in range(4):
        table = pool.allocate(2, room=3)
        starts.append(table[0].id)
        pool.free(table)
    assert starts == [1, 4, 1, 4]


def test_without_a_run_single_blocks_are_taken() -> None:
    pool = BlockPool(num_blocks=7, num_tables=2)
    blocks = pool.allocate(6)
    pool.free([blocks[1], blocks[3], blocks[5]])
    assert sorted(ids(pool.allocate(3))) == [2, 4, 6]


def test_wanted_prefixes_leave_last_and_from_the_tail() -> None:
    pool = BlockPool(num_blocks=9, num_tables=1)
    old, young = pool.allocate(4), pool.allocate(4)
    name(old[:3] + young)
    for block in old[:3] + young:
        pool.share(block)
    pool.free(old)
    pool.free(young)
    pool.free(old[:3])
    pool.free(young)
    assert pool.num_free_cached == 7
    # First the block without a name, then the older chain from its tail, then the younger one.
    assert [pool.allocate(1)[0].id for _ in range(8)] == [4, 3, 2, 1, 8, 7, 6, 5]


def test_a_growing_table_without_a_neighbour_takes_worthless_blocks_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=6, num_tables=1)
    cached, worthless, growing = pool.allocate(2), pool.allocate(1), pool.allocate(2)
    name(cached)
    pool.free(cached, wanted=True)
    pool.free(worthless)
    assert ids(pool.allocate(1, after=growing[-1])) == [3]
    assert ids(pool.allocate(1, after=growing[-1])) == [2]


def test_a_block_with_new_content_is_no_longer_wanted() -> None:
    pool = BlockPool(num_blocks=5, num_tables=1)
    blocks = pool.allocate(4)
    name(blocks)
    pool.free(blocks, wanted=True)
    for block in (reused := pool.allocate(2)):
        block.hash = None
    assert ids(reused) == [4, 3]
    name(reused)
    pool.free(reused)
    # The list alone would go on with block 2; the run of unwanted blocks is preferred.
    assert ids(pool.allocate(2)) == [3, 4]


def test_a_shared_block_is_free_when_the_last_table_lets_go() -> None:
    pool = BlockPool(num_blocks=3, num_tables=1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_a_cached_free_block_can_be_revived_from_the_middle_of_the_list() -> None:
    pool = BlockPool(num_blocks=4, num_tables=1)
    blocks = pool.allocate(3)
    name(blocks)
    pool.free(blocks)
    pool.share(blocks[1])
    pool.check_invariants([[blocks[1]]])
    assert (pool.num_free, pool.num_free_cached) == (2, 2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["new", "grow", "free", "share", "name"]), st.integers(0, 99)), max_size=60))
def test_blocks_are_conserved(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks=12, num_tables=3)
    tables: list[list[Block]] = []
    for action, number in actions:
        table = tables[number % len(tables)] if tables else None
        if action == "new" and pool.num_free > number % 4:
            tables.append(pool.allocate(number % 4 + 1, room=number % 6))
        elif action == "grow" and table and pool.num_free:
            table += pool.allocate(1, after=table[-1])
        elif action == "free" and table:
            tables.remove(table)
            pool.free(table, wanted=number % 2 == 0)
        elif action == "share" and table:
            for block in table:
                pool.share(block)
            tables.append(list(table))
        elif action == "name" and table:
            name(table)
        pool.check_invariants(tables)
        assert all(block.id != 0 for table in tables for block in table)
