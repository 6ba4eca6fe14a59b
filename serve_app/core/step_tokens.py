"""The maximum number of tokens in a step for `max_num_batched_tokens: auto`.

Uses measurements taken at start: with more tokens in a step each costs less, but all streams wait longer for it. Pure:
it measures nothing itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.doubling import Objection, double

LEAST, MOST = 128, 8192
_USUAL = 256
"""A larger step must be as short as `_SHORT_STEP_S`, by default the time between two events of a stream."""
_SHORT_STEP_S = 0.05
_USUAL_STEP_S = 0.6
"""A step of the usual number is chosen if it takes no longer than this: prompts wait half as long for room beside
decodes, twice as many tokens share the reading of earlier keys, and drafts have room, none of which is measured. The
cost: every stream pauses this long beside a prompt."""
_LONG_STEP_S = 0.1
"""For a GPU, where a token costs about the same in steps of 1,000 and 8,000 tokens."""
_WORTH = 0.95
"""Highest relative cost per token at which a doubled step is worth it. Below 1, since measured steps vary by a few
percent."""

_NO_OBJECTION = "more are not worth it"


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The chosen number of tokens, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"max_num_batched_tokens={self.number} ({self.reason})"


def choose_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> StepTokens:
    """For a CPU: from `least` (unless that exceeds `most`) to `most` tokens.

    step_s: measures a step of this many tokens, in seconds, on each call.
    """

    def objection(tokens: int, more: int) -> Objection | None:
        longest = math.inf if more <= _USUAL else _SHORT_STEP_S
        seconds = step_s(tokens)
        longer = seconds if seconds > longest else step_s(more)
        if longer > longest:
            return Objection(f"a step of {more} would take more than {longest * 1e3:.0f} ms", longer / longest)
        is_usual = more == _USUAL and longer <= _USUAL_STEP_S
        dearer = longer / seconds * tokens / more
        if dearer > _WORTH and not is_usual:
            return Objection(f"{more} would compute hardly more tokens per second", dearer / _WORTH)
        return None

    tokens, found = double(min(max(LEAST, least), most), most, objection)
    return StepTokens(tokens, found or _NO_OBJECTION)


def shorten_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> StepTokens:
    """For a GPU: `most`, halved until a step is short enough, at least `least`. step_s: see `choose_step_tokens`."""
    least = min(max(LEAST, least), most)
    tokens, reason = most, _NO_OBJECTION
    while tokens > least and step_s(tokens) > _LONG_STEP_S:
        reason = f"a step of {tokens} would take more than {_LONG_STEP_S * 1e3:.0f} ms"
        tokens = max(least, tokens // 2)
    return StepTokens(tokens, reason)
