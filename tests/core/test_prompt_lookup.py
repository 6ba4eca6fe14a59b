"""Guesses from a request's own text, against a search that remembers nothing."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.prompt_lookup import MAX_MATCH, PromptLookup

TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
COST = 0.15


def search(token_ids: list[int], count: int) -> tuple[int, ...]:
    """What followed the last earlier occurrence of the longest end of the text that has one, again
    and again."""
    for length in range(MAX_MATCH, 0, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                followers = token_ids[end:]
                return tuple((followers * (count // len(followers) + 1))[:count])
    return ()


@given(st.lists(st.integers(0, 2), max_size=40), st.data())
def test_guesses_are_those_of_a_search(token_ids: list[int], data: st.DataObject) -> None:
    """However the text grew, and whatever part of the guess was thought worth trying."""
    lookup, known = PromptLookup(), 0
    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        at_most = data.draw(st.integers(1, 6))
        guess = lookup.propose(token_ids[:known], at_most, COST)
        assert guess == search(token_ids[:known], at_most)[: len(guess)]


def test_a_text_that_begins_again_is_continued() -> None:
    assert PromptLookup().propose([*TEXT, 1, 2, *TEXT[:3]], 2, COST) == (8, 9)
    assert PromptLookup().propose([*TEXT, 1, 2, *TEXT[:3]], 1, COST) == (8,)


def test_a_text_that_goes_round_in_circles_goes_round_once_more() -> None:
    assert PromptLookup().propose([1, 5, 5, 5, 5], 2, COST) == (5, 5)
    assert PromptLookup().propose([1, 2, 3, 4, 3, 4, 3], 2, COST) == (4, 3)


def test_a_longer_match_counts_more_than_a_later_one() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 9, 3, 7, 1, 2, 3], 1, COST) == (4,)


def test_of_very_many_places_only_the_latest_are_compared() -> None:
    """A match of three, and behind it a pair again and again, each time behind another token."""
    pairs = [token_id for i in range(63) for token_id in (100 + i, 1, 2)]
    assert PromptLookup().propose([9, 1, 2, 7, *pairs, 9, 1, 2], 1, COST) == (7,)
    assert PromptLookup().propose([9, 1, 2, 7, 99, 1, 2, *pairs, 9, 1, 2], 1, COST) == (9,)


def test_too_little_to_go_by_is_no_guess() -> None:
    for token_ids in ([1], [1, 2], TEXT, [*TEXT, 6, 5]):
        assert PromptLookup().propose(token_ids, 7, COST) == ()


def test_what_costs_more_must_be_likelier() -> None:
    token_ids = [*TEXT, 1, 2, *TEXT[:3]]
    lengths = [len(PromptLookup().propose(token_ids, 7, cost)) for cost in (0.05, 0.15, 0.3, 0.6)]
    assert lengths == [4, 2, 1, 0]


def grow(lookup: PromptLookup, token_ids: list[int], news: list[int]) -> list[tuple[int, int]]:
    """Append `news` as an engine would, right guesses at once; of every guess the length, and how
    much was right."""
    guesses, target = [], [*token_ids, *news]
    while len(token_ids) < len(target):
        guess = lookup.propose(token_ids, 7, COST)
        rest = target[len(token_ids) :]
        right = 0
        while right < min(len(guess), len(rest) - 1) and guess[right] == rest[right]:
            right += 1
        guesses.append((len(guess), right))
        token_ids += rest[: right + 1]
    return guesses


def test_guesses_grow_with_success() -> None:
    token_ids = [*range(100, 200)]
    lengths = [length for length, _ in grow(PromptLookup(), token_ids, [*range(110, 170)])]
    assert lengths[:2] == [0, 0]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 7


def test_what_keeps_failing_is_no_longer_tried() -> None:
    """Three tokens that always come together, and then another one each time."""
    lookup, token_ids = PromptLookup(), []
    guesses = grow(lookup, token_ids, [token_id for i in range(40) for token_id in (1, 2, 3, 300 + i)])
    assert any(length > right for length, right in guesses)
    assert all(length == right for length, right in guesses[-20:])
    assert any(length for length, _ in guesses[-20:])


def test_text_that_begins_to_repeat_itself_is_noticed_after_failures() -> None:
    lookup, token_ids = PromptLookup(), []
    grow(lookup, token_ids, [token_id for i in range(20) for token_id in (1, 2, 3, 300 + i)])
    assert max(grow(lookup, token_ids, [7, 8, 9, 10, 11] * 12)) == (7, 7)
