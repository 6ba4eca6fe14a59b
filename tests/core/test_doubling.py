"""Doubling: the largest number that is borne, and no single disturbed measurement that makes it
smaller."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.autosize import Objection, double


@given(number=st.integers(1, 100), most=st.integers(100, 10_000), limit=st.integers(1, 10_000))
def test_the_largest_that_is_borne(number: int, most: int, limit: int) -> None:
    def objection(_: int, more: int) -> Objection | None:
        return Objection(f"{more} is too many", more / limit) if more > limit else None

    found, reason = double(number, most, objection)
    assert number <= found <= most
    if reason is None:
        assert found == most
    else:
        assert found <= max(number, limit)
        assert reason == f"{min(2 * found, most)} is too many"
        assert min(2 * found, most) > limit


@given(disturbed=st.lists(st.booleans(), max_size=40), excess=st.sampled_from([1.1, 3.0]))
def test_an_objection_must_be_confirmed_unless_it_is_certain(disturbed: list[bool], excess: float) -> None:
    asked: list[tuple[int, int]] = []

    def objection(*numbers: int) -> Objection | None:
        asked.append((numbers[0], numbers[1]))
        is_disturbed = len(asked) <= len(disturbed) and disturbed[len(asked) - 1]
        return Objection("disturbed", excess) if is_disturbed else None

    found, reason = double(1, 16, objection)
    needed = 5 if excess < 2 else 1
    refused = "T" * needed in "".join("FT"[one] for one in disturbed[: len(asked)])
    assert (found < 16) == (reason is not None) == refused
    assert all(asked.count(pair) <= needed for pair in asked)
