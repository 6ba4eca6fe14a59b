"""What it records, it delivers."""

from typing import Any

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet.resume_state import ResumeState, TokenGapError


def delta(choice: int, offset: int, *token_ids: int, **more: Any) -> TokenDelta:
    return TokenDelta(request_id="r", choice=choice, offset=offset, token_ids=token_ids, **more)


def test_outputs_of_which_a_part_is_out_of_place_are_not_recorded() -> None:
    state = ResumeState(EngineRequest("r", (1, 2), SamplingParams(n=2)))
    state.next_attempt()
    assert state.accept([delta(0, 0, 7, 8), delta(0, 2, 9), delta(1, 0, 5)])
    last = delta(0, 4, finish_reason=FinishReason.LENGTH, num_cached_tokens=0)
    for misplaced in (delta(1, 2, 6), delta(0, 3, 6)):
        with pytest.raises(TokenGapError):
            state.accept([delta(0, 3, 4), last, misplaced])
    again = state.next_attempt()
    assert again.prior_output_ids == ((7, 8, 9), (5,))
    assert again.finished_choices == ()
    assert state.accept([delta(0, 3, 4), last]) == [delta(0, 3, 4), last]
