from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.keyed_heap import KeyedHeap


@given(st.lists(st.tuples(st.integers(0, 40), st.none() | st.integers(0, 5)), max_size=400))
def test_the_first_is_the_oldest_of_the_lowest_rank(steps: list[tuple[int, int | None]]) -> None:
    heap: KeyedHeap[int, int] = KeyedHeap()
    ranks: dict[int, int] = {}  # by age
    for key, rank in steps:
        if rank is None:
            heap.discard(key)
            ranks.pop(key, None)
        else:
            heap.put(key, rank)
            if ranks.get(key) != rank:
                ranks.pop(key, None)
                ranks[key] = rank
        assert heap.first() == min(ranks, key=lambda key: ranks[key], default=None)


def test_stale_items_do_not_pile_up() -> None:
    heap: KeyedHeap[str, int] = KeyedHeap()
    heap.put("first", -1)
    for rank in range(1000):
        heap.put("again and again", rank)
    assert len(heap._heap) <= 2 * 2 + 65
    assert heap.first() == "first"
