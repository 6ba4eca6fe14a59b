"""How much may wait for readers: of one stream, and of all."""

import sys
from typing import Any

from serve_app.core.results import LOGPROBS, TokenDelta, TokenLogprob
from serve_app.fleet.unread import UnreadBytes, UnreadItems, item_bytes
from serve_app.fleet.wire import pack_deltas
from tests.fleet.replicas import travelled


def item(num_tokens: int, num_alternatives: int) -> Any:
    """What a link brings of one flush."""
    top = tuple((1000 + i, -1.5 * i) for i in range(num_alternatives))
    logprobs = tuple(TokenLogprob(500 + i, -0.5, top) for i in range(num_tokens))
    results = {LOGPROBS: logprobs} if num_alternatives else {}
    delta = TokenDelta("r", 0, 0, tuple(range(1000, 1000 + num_tokens)), None, None, None, results, {})
    return travelled(pack_deltas([delta]))


def deep_size(value: Any) -> int:
    parts = value.items() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return sys.getsizeof(value) + sum(map(deep_size, parts))


def test_the_estimate_is_near_what_an_item_takes() -> None:
    for num_tokens, num_alternatives in ((1, 0), (50, 0), (1, 20), (4, 20), (30, 1)):
        real, told = deep_size(item(num_tokens, num_alternatives)), item_bytes(item(num_tokens, num_alternatives))
        assert 0.5 * real < told < 2 * real
    assert item_bytes({"error": "EngineError"}) > 0


async def test_one_item_is_always_taken_and_reading_makes_room() -> None:
    total = UnreadBytes(max_stream_bytes=1)
    items = UnreadItems(total)
    items.put(item(4, 20))
    assert not items.are_too_many
    items.put(item(4, 20))
    assert items.are_too_many
    await items.get()
    await items.get()
    assert total.held == 0


def test_those_who_stand_still_leave_room_for_others() -> None:
    size = item_bytes(item(4, 20))
    total = UnreadBytes(max_stream_bytes=1000 * size, max_bytes=100 * size)
    greedy = [UnreadItems(total) for _ in range(20)]
    for _ in range(100):
        for items in greedy:
            if not items.are_too_many:
                items.put(item(4, 20))
    assert all(items.are_too_many for items in greedy)
    assert total.held <= 100 * size
    other = UnreadItems(total)
    other.put(item(1, 0))
    other.put(item(1, 0))
    assert not other.are_too_many
    for items in greedy:
        items.clear()
    other.clear()
    assert total.held == 0
