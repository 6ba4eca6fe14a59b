"""The acceptance probability that makes a draft token worth its time.

An accepted draft saves a row of a later step, which is worth that row's share of the step. Every draft makes this step
longer. In steps of few rows, limited by reading weights, unlikely drafts pay; in steps limited by compute only nearly
certain ones do. Uses measurements taken at start. Pure: it measures nothing itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ROWS = (1, 16)
"""Numbers of decodes that are measured, in addition to `max_num_seqs`."""
_TOKENS = 8
"""Approximate number of tokens in a measured step with drafts; each row has at least one draft."""
_TRIES = 3
"""Their difference is small, and either may be longer for once."""
_LONGEST_STEP_S = 0.2
"""After a step that takes longer, a start has no time for another or a larger one."""
_LEAST = 0.01
"""Lower limit for the cost of a draft, as a fraction of a decode's share, against measurement noise."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """A step of `rows[i]` decodes (ascending) takes `step_s[i]` seconds, each draft `draft_s[i]` more.

    Linear between two numbers of rows, constant beyond the last."""

    rows: Sequence[int] = (1,)
    step_s: Sequence[float] = (1.0,)
    draft_s: Sequence[float] = (0.1,)

    def __str__(self) -> str:
        chances = ", ".join(f"{self.least_chance(rows):.0%} beside {rows}" for rows in self.rows)
        return f"speculation: least acceptance probability of a draft: {chances} decodes (above 100%: no drafts)"

    def least_chance(self, num_decodes: int) -> float:
        """The least useful acceptance probability beside `num_decodes` >= 1 decodes; above 1: no draft is useful."""
        draft_s, step_s = self._at(num_decodes, self.draft_s), self._at(num_decodes, self.step_s)
        return draft_s * num_decodes / step_s

    def _at(self, rows: int, values: Sequence[float]) -> float:
        above = bisect_left(self.rows, rows)
        if above == len(self.rows):
            return values[-1]
        if above == 0:
            return values[0]
        below = above - 1
        part = (rows - self.rows[below]) / (self.rows[above] - self.rows[below])
        return values[below] + part * (values[above] - values[below])


NEVER = DraftCost(draft_s=(2.0,))
"""With overlap: a draft needs the token that is still being computed, and ends the overlap."""

FOR_FEW = DraftCost((1, 3, 4), (1.0, 1.0, 1.0), (0.05, 0.05, 1.0))
"""For devices whose steps are not measured: reading the weights dominates, and larger steps are launched in ways that
do not support drafts."""


def measure_draft_cost(
    max_num_seqs: int, max_num_batched_tokens: int, step_s: Callable[[int, int], float]
) -> DraftCost:
    """step_s(decodes, drafts per decode): measures a step in seconds on each call; the last result counts."""
    rows: list[int] = []
    steps_s: list[float] = []
    drafts_s: list[float] = []
    for number in sorted({*(few for few in _ROWS if few < max_num_seqs), max_num_seqs}):
        drafts = max(1, _TOKENS // number - 1)
        if number * (1 + drafts) > max_num_batched_tokens:
            break
        for _ in range(_TRIES):
            plain, drafted = step_s(number, 0), step_s(number, drafts)
            if drafted > _LONGEST_STEP_S:
                break
        rows.append(number)
        steps_s.append(plain)
        drafts_s.append(max(_LEAST * plain, (drafted - plain) / drafts) / number)
        if drafted > _LONGEST_STEP_S:
            break
    return DraftCost(rows, steps_s, drafts_s) if rows else FOR_FEW
