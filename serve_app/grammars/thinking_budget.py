"""Limits reasoning tokens: once the budget is used, the reasoning is closed by force.

An output's stage is a function of its tokens, as in a grammar. `BudgetedMatcher` combines the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from serve_app.core.sampling_params import ThinkingBudget


class Phase(Enum):
    """The part of an output, relative to its reasoning."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class Stage(NamedTuple):
    """The progress of an output.

    text: the whole text so far (BEFORE), or its end (INSIDE). num_tokens: tokens of the
    reasoning. num_closing: forced tokens of the closing mark.
    """

    phase: Phase
    text: bytes = b""
    num_tokens: int = 0
    num_closing: int = 0


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Follows outputs with a reasoning budget."""

    budget: ThinkingBudget

    def start(self) -> Stage:
        """Return the stage before the first token."""
        return Stage(Phase.BEFORE if self.budget.open else Phase.INSIDE)

    def advance(self, stage: Stage, data: bytes, *, closing: bool) -> Stage:
        """Return the stage after a token with the bytes `data`.

        closing: it is the first token of `rest`.
        """
        text = stage.text + data
        if stage.phase is Phase.BEFORE:
            mark, solid = self.budget.open.encode(), text.lstrip()
            if solid.startswith(mark):
                return Stage(Phase.INSIDE)
            return Stage(Phase.BEFORE, text) if mark.startswith(solid) else Stage(Phase.AFTER)
        if stage.phase is Phase.AFTER or self.budget.close.encode() in text:
            return Stage(Phase.AFTER)
        keep = len(self.budget.close.encode()) + 4
        return Stage(Phase.INSIDE, text[-keep:], stage.num_tokens + 1, stage.num_closing + 1 if closing else 0)

    def rest(self, stage: Stage, close_ids: Sequence[int]) -> Sequence[int]:
        """Return the rest of the closing mark's tokens if they must come next, else nothing.

        They must once the budget is used and the last character is complete.
        """
        if stage.phase is not Phase.INSIDE or stage.num_tokens < self.budget.max_tokens or not _is_whole(stage.text):
            return ()
        return close_ids[stage.num_closing :]


def _is_whole(text: bytes) -> bool:
    """Whether UTF-8 text ends with a complete character."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte < 0x80:
            return True
        if byte >= 0xC0:  # a character's first byte gives its length
            return length >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
