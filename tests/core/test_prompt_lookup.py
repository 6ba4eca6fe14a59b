"""Guesses from a request's own text, against a search that remembers nothing."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.prompt_lookup import NGRAM, PromptLookup

TEXT = [5, 6, 7, 8, 9, 10, 11, 12]


def search(token_ids: list[int], count: int) -> tuple[int, ...]:
    """What followed the last earlier occurrence of the newest n-gram, repeated up to `count` tokens."""
    end = len(token_ids)
    for match in range(end - 1, NGRAM - 1, -1):
        if token_ids[match - NGRAM : match] == token_ids[-NGRAM:]:
            followers = token_ids[match:]
            return tuple((followers * (count // len(followers) + 1))[:count])
    return ()


@given(st.lists(st.integers(0, 2), max_size=40), st.data())
def test_guesses_are_those_of_a_search(token_ids: list[int], data: st.DataObject) -> None:
    """However the text grew, and whatever part of the guess was thought worth trying."""
    lookup, known = PromptLookup(), 0
    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        at_most = data.draw(st.integers(1, 6))
        guess = lookup.propose(token_ids[:known], at_most)
        assert guess == search(token_ids[:known], at_most)[: len(guess)]


def test_a_text_that_begins_again_is_continued() -> None:
    assert PromptLookup().propose([*TEXT, 1, 2, *TEXT[:3]], 2) == (8, 9)
    assert PromptLookup().propose([*TEXT, 1, 2, *TEXT[:3]], 1) == (8,)


def test_a_text_that_goes_round_in_circles_goes_round_once_more() -> None:
    assert PromptLookup().propose([1, 5, 5, 5, 5], 2) == (5, 5)
    assert PromptLookup().propose([1, 2, 3, 4, 3, 4, 3], 2) == (4, 3)


def test_nothing_to_go_by_is_no_guess() -> None:
    for token_ids in ([1], [1, 1, 1], TEXT, [*TEXT, 6, 5]):
        assert PromptLookup().propose(token_ids, 7) == ()


def grow(lookup: PromptLookup, token_ids: list[int], news: list[int]) -> list[int]:
    """Append `news` as an engine would, accepted guesses at once; the lengths of the guesses."""
    lengths, target = [], [*token_ids, *news]
    while len(token_ids) < len(target):
        guess = lookup.propose(token_ids, 7)
        lengths.append(len(guess))
        rest = target[len(token_ids) :]
        right = 0
        while right < min(len(guess), len(rest) - 1) and guess[right] == rest[right]:
            right += 1
        token_ids += rest[: right + 1]
    return lengths


def test_guesses_grow_with_success_and_end_with_failure() -> None:
    lookup, token_ids = PromptLookup(), [*range(100, 200)]
    copy = grow(lookup, token_ids, [*range(110, 170)])
    assert copy[:NGRAM] == [0] * NGRAM
    assert copy[-1] == max(copy) == 7
    # Three known tokens, then another one than the last time, for ever new.
    misleading = [token_id for i in range(20) for token_id in (1, 2, 3, 300 + i)]
    assert grow(lookup, token_ids, misleading)[-8:] == [0] * 8


def test_text_that_repeats_itself_is_noticed_after_failures() -> None:
    lookup, token_ids = PromptLookup(), []
    grow(lookup, token_ids, [token_id for i in range(20) for token_id in (1, 2, 3, 300 + i)])
    assert max(grow(lookup, token_ids, [7, 8, 9, 10, 11] * 8)) == 7
