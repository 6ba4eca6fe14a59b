"""The draft tokens of one step: who gets how many."""

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import Request

MAX_DRAFTS = 15
"""Of one row: with its newest token they fill a tile of the widest kernels."""
_MAX_FORCED = 16
"""Drafts of one row that its grammar leaves no choice about: each is computed once, now or in a later step."""


class StepDrafts:
    """Drafts for the decodes of a step, asked for in the order in which they get their rows.

    Guesses must be likely enough to be worth their time (see `draft_cost`); those of all rows together leave half of a
    step's tokens to prompts. What a grammar forces costs nothing that would not be paid later.
    """

    def __init__(self, config: SchedulerConfig, num_decodes: int) -> None:
        self._is_on = config.speculation == "auto" and num_decodes > 0
        self._least_chance = config.draft_cost.least_chance(num_decodes) if self._is_on else 1.0
        self._room = config.max_num_batched_tokens // 2 - num_decodes if self._least_chance <= 1 else 0

    def propose(self, request: Request, left: int) -> tuple[int, ...]:
        """`left`: tokens that the step has for drafts of this and of later rows."""
        if not self._is_on:
            return ()
        if request.forced:
            return request.draft(min(_MAX_FORCED, left), self._least_chance)
        drafts = request.draft(min(MAX_DRAFTS, self._room, left), self._least_chance)
        self._room -= len(drafts)
        return drafts
