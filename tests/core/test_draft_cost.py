"""What a draft must be worth: a share of a step that is measured, and sensible whatever the
measurements were."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.autosize import FOR_FEW, NEVER, DraftCost, measure_draft_cost


def linear(fixed_ms: float, row_ms: float, draft_ms: float) -> Callable[[int, int], float]:
    return lambda rows, drafts: (fixed_ms + rows * (row_ms + drafts * draft_ms)) / 1e3


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40, 64])
def test_a_draft_costs_its_time_and_saves_a_row_of_a_step(rows: int) -> None:
    cost = measure_draft_cost(64, 256, linear(2.0, 0.3, 0.2))
    assert cost.least_chance(rows) == pytest.approx(0.2 * rows / (2.0 + 0.3 * rows))


def test_where_reading_weights_takes_the_time_drafts_are_cheap_and_where_rows_do_dear() -> None:
    assert measure_draft_cost(16, 256, linear(100.0, 0.1, 0.1)).least_chance(16) < 0.05
    assert measure_draft_cost(16, 256, linear(0.1, 1.0, 1.1)).least_chance(16) > 1


def test_unmeasured_drafts_are_for_few_and_with_overlap_for_nobody() -> None:
    assert all(NEVER.least_chance(rows) > 1 for rows in (1, 16))
    assert [FOR_FEW.least_chance(rows) > 1 for rows in (1, 2, 3, 4, 16)] == [False, False, False, True, True]


@given(
    most=st.integers(1, 256),
    tokens=st.integers(1, 1024),
    steps_s=st.lists(st.floats(1e-6, 10), min_size=18, max_size=18),
    rows=st.integers(1, 256),
)
def test_whatever_was_measured(most: int, tokens: int, steps_s: list[float], rows: int) -> None:
    """No step is measured that cannot occur, none after a slow one, and a draft is never for
    nothing."""
    measured: list[tuple[int, int]] = []

    def step_s(num_rows: int, num_drafts: int) -> float:
        measured.append((num_rows, num_drafts))
        return steps_s[len(measured) - 1]

    cost = measure_draft_cost(most, max(most, tokens), step_s)
    assert cost.least_chance(rows) > 0
    assert all(count <= most and count * (1 + drafts) <= max(most, tokens) for count, drafts in measured)
    assert all(steps_s[before] <= 0.2 for before in range(1, len(measured) - 1, 2)), "every second step has drafts"
    assert all(measured.count(step) <= 3 for step in measured)


def test_between_two_measured_numbers_it_is_between() -> None:
    cost = DraftCost((1, 5), (1.0, 2.0), (0.1, 0.3))
    assert "10% beside 1, 75% beside 5 decodes" in str(cost)
    assert [cost.least_chance(rows) for rows in (1, 3, 5, 10)] == pytest.approx([0.1, 3 * 0.2 / 1.5, 0.75, 1.5])
