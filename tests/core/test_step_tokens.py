"""The tokens of a step: within their limits whatever was measured, and what a few measurements
mean."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.autosize import MAX_STEP_TOKENS, MIN_STEP_TOKENS, Size, choose_step_tokens, shorten_step_tokens


def linear(fixed_ms: float, token_ms: float) -> Callable[[int], float]:
    return lambda tokens: (fixed_ms + token_ms * tokens) / 1e3


Choose = Callable[[int, int, Callable[[int], float]], Size]


@pytest.mark.parametrize("choose", [choose_step_tokens, shorten_step_tokens])
@given(
    least=st.integers(1, MAX_STEP_TOKENS),
    most=st.integers(1, MAX_STEP_TOKENS),
    steps_s=st.lists(st.floats(1e-6, 10), min_size=1, max_size=30),
)
def test_the_number_is_within_its_limits_whatever_was_measured(
    choose: Choose, least: int, most: int, steps_s: list[float]
) -> None:
    measured: list[int] = []

    def step_s(tokens: int) -> float:
        measured.append(tokens)
        return steps_s[len(measured) % len(steps_s)]

    chosen = choose(least, most, step_s)
    assert min(max(MIN_STEP_TOKENS, least), most) <= chosen.number <= most
    assert not measured or chosen.number in measured or chosen.number == min(max(MIN_STEP_TOKENS, least), most)
    assert all(measured.count(tokens) <= 10 for tokens in measured)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (linear(10.0, 0.15), "max_num_batched_tokens=256 (a step of 512 would take more than 50 ms)"),
        (linear(300.0, 10.0), "max_num_batched_tokens=256 (a step of 512 would take more than 50 ms)"),
        (linear(50.0, 10.0), "max_num_batched_tokens=128 (256 would compute hardly more tokens per second)"),
        (linear(0.0, 2.4), "max_num_batched_tokens=128 (256 would compute hardly more tokens per second)"),
        (linear(0.0, 2.3), "max_num_batched_tokens=256 (a step of 512 would take more than 50 ms)"),
        (linear(0.0, 0.3), "max_num_batched_tokens=256 (a step of 512 would take more than 50 ms)"),
        (linear(10.0, 0.02), "max_num_batched_tokens=1024 (a step of 2048 would take more than 50 ms)"),
        (linear(1.0, 0.004), "max_num_batched_tokens=4096 (8192 would compute hardly more tokens per second)"),
        (linear(1.0, 1e-6), "max_num_batched_tokens=8192 (more are not worth it)"),
    ],
)
def test_cheaper_tokens_count_until_streams_would_stutter(step_s: Callable[[int], float], expected: str) -> None:
    assert str(choose_step_tokens(1, MAX_STEP_TOKENS, step_s)) == expected


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (linear(1.0, 0.002), "max_num_batched_tokens=8192 (more are not worth it)"),
        (linear(0.0, 196 / 8192), "max_num_batched_tokens=4096 (a step of 8192 would take more than 100 ms)"),
        (linear(5.0, 0.05), "max_num_batched_tokens=1024 (a step of 2048 would take more than 100 ms)"),
        (linear(150.0, 0.1), "max_num_batched_tokens=128 (a step of 256 would take more than 100 ms)"),
    ],
)
def test_a_gpu_takes_the_most_that_do_not_hold_up_streams(step_s: Callable[[int], float], expected: str) -> None:
    """The second is an 8B model in bfloat16 on an H200."""
    assert str(shorten_step_tokens(1, MAX_STEP_TOKENS, step_s)) == expected


def test_a_step_that_must_be_longer_than_one_that_is_too_long_is_not_measured() -> None:
    measured: list[int] = []

    def step_s(tokens: int) -> float:
        measured.append(tokens)
        return linear(300.0, 10.0)(tokens)

    choose_step_tokens(1, MAX_STEP_TOKENS, step_s)
    assert set(measured) == {128, 256}


def test_there_are_never_fewer_than_asked_for() -> None:
    assert choose_step_tokens(300, MAX_STEP_TOKENS, linear(0.0, 1.0)).number == 300
