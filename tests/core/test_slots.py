"""The number of sequences at once: within its limits whatever was measured, and what a few
measurements mean."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.autosize import MAX_SLOTS, MIN_SLOTS, SEQUENCE_TOKENS, choose_slots, max_slots
from serve_app.core.config import SchedulerKnobs

LARGE_POOL = MAX_SLOTS * SEQUENCE_TOKENS


def linear(fixed_ms: float, row_ms: float) -> Callable[[int], float]:
    return lambda rows: (fixed_ms + row_ms * rows) / 1e3


@given(st.integers(1, 100_000))
def test_the_most_fits_into_a_step(tokens: int) -> None:
    most = max_slots(tokens)
    assert 1 <= most <= MAX_SLOTS
    SchedulerKnobs(max_num_seqs=most, max_num_batched_tokens=tokens)
    assert most <= max(MIN_SLOTS, tokens // 2)


@given(
    most=st.integers(1, MAX_SLOTS),
    pool_tokens=st.integers(1, 10**6),
    steps_s=st.none() | st.lists(st.floats(1e-6, 10), min_size=1, max_size=30),
)
def test_the_number_is_within_its_limits_whatever_was_measured(
    most: int, pool_tokens: int, steps_s: list[float] | None
) -> None:
    measured: list[int] = []

    def step_s(rows: int) -> float:
        measured.append(rows)
        assert steps_s is not None
        return steps_s[len(measured) % len(steps_s)]

    slots = choose_slots(most, pool_tokens, None if steps_s is None else step_s)
    assert min(MIN_SLOTS, most) <= slots.number <= most
    assert slots.number <= max(MIN_SLOTS, pool_tokens // SEQUENCE_TOKENS)
    assert not measured or slots.number in measured
    assert all(measured.count(rows) <= 10 for rows in measured)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (linear(2.0, 1.6), 64),  # 64 rows take 104 ms, 128 would take 207
        (linear(2.0, 0.1), MAX_SLOTS),
        (linear(80.0, 4.0), MIN_SLOTS),  # 32 rows would take 208 ms
        (linear(400.0, 1.0), MIN_SLOTS),  # even these are slow
        # a row costs the same with any number beside it: 128 rows take 154 ms
        (linear(0.0, 1.2), 128),
        (lambda rows: 1e-5 * rows**2, MIN_SLOTS),  # 32 rows give half the tokens a second
        (None, MAX_SLOTS),
    ],
)
def test_steps_that_bear_more_get_more(step_s: Callable[[int], float] | None, expected: int) -> None:
    assert choose_slots(MAX_SLOTS, LARGE_POOL, step_s).number == expected


@pytest.mark.parametrize("step_s", [linear(2.0, 0.1), None])
def test_a_pool_bounds_them(step_s: Callable[[int], float] | None) -> None:
    slots = choose_slots(MAX_SLOTS, 100 * SEQUENCE_TOKENS + 99, step_s)
    assert str(slots) == "max_num_seqs=100 (the KV pool has 25699 tokens)"
    assert choose_slots(MAX_SLOTS, 10, step_s).number == MIN_SLOTS


@pytest.mark.parametrize(
    ("step_s", "reason"),
    [
        (linear(2.0, 1.6), "a step of 128 would take 207 ms"),
        (lambda rows: 1e-5 * rows**2, "32 would give fewer tokens per second"),
        (linear(2.0, 0.1), "more are not worth it"),
    ],
)
def test_the_reason_is_told(step_s: Callable[[int], float], reason: str) -> None:
    assert choose_slots(MAX_SLOTS, LARGE_POOL, step_s).reason == reason


def test_prompts_keep_their_part_of_a_step() -> None:
    slots = choose_slots(max_slots(256), LARGE_POOL, linear(2.0, 0.1))
    assert str(slots) == "max_num_seqs=128 (the rest of a step is for prompts)"
