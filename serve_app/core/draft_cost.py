"""How likely a draft token must be to be right, to be worth its time.

A right draft saves a row of a later step, which is worth that row's share of the step; right or wrong, a draft makes
this step longer. So where a step reads its weights for few rows, unlikely drafts pay; where rows are all that it
computes, only nearly certain ones do. Decides by what was measured at start. Pure: it measures nothing itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ROWS = (1, 16)
"""Numbers of decodes that are measured, beside the most that may run at once."""
_TOKENS = 8
"""A measured step with drafts has about so many tokens, and at least a draft for each row."""
_TRIES = 3
"""Their difference is small, and either may be longer for once."""
_LONGEST_STEP_S = 0.2
"""After a step that takes longer, a start has no time for another or a larger one."""
_LEAST = 0.01
"""Of a decode's share, what a draft costs at least, whatever noise made of the measurement."""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Steps of `rows` decodes (ascending numbers) take `step_s` seconds, each draft `draft_s` more; lists of the same
    length. Linear between two numbers of rows, beyond the last as there."""

    rows: Sequence[int] = (1,)
    step_s: Sequence[float] = (1.0,)
    draft_s: Sequence[float] = (0.1,)

    def __str__(self) -> str:
        chances = ", ".join(f"{self.least_chance(rows):.0%} beside {rows}" for rows in self.rows)
        return f"drafts are tried from a chance of {chances} decodes on"

    def least_chance(self, num_decodes: int) -> float:
        """How likely a draft must be to be right where so many rows decode, at least one; above 1: none is worth it."""
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
"""Where steps are not measured: reading the weights takes the time, and more rows than a few are launched in ways that
know no drafts."""


def measure_draft_cost(
    max_num_seqs: int, max_num_batched_tokens: int, step_s: Callable[[int, int], float]
) -> DraftCost:
    """step_s: measures a step of so many decodes with so many drafts each, in seconds, each time it is asked; the last
    answer counts."""
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
