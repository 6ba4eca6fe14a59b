"""How many tokens a step has at most where the settings leave that to the engine (`max_num_batched_tokens: auto`).

Decides by what was measured at start: the more tokens a step has, the less each costs, and the longer all streams wait
for it. Pure: it measures nothing itself.
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
"""A step of the usual number that takes no longer needs no other reason: a crowd's prompts wait half as long for room
beside its decodes, twice as many tokens of a prompt share the reading of the keys before them, and drafts have room,
none of which is measured. The price: every stream stands still for so long beside a prompt."""
_LONG_STEP_S = 0.1
"""Of a GPU, on which a token costs about the same in steps of 1,000 tokens and of 8,000."""
_WORTH = 0.95
"""What a token may cost at most in a step of twice as many, for these to be worth it. Below 1, since a measured step
may take a few hundredths longer than the next one."""

_NO_OBJECTION = "no more are worth it"


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A number of tokens, and what kept it from being larger."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} tokens in a step at most: {self.reason}"


def choose_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> StepTokens:
    """For a CPU: at most `most`, and at least `least` where that is not more.

    step_s: measures a step of so many tokens, in seconds, each time it is asked.
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
            return Objection(f"{more} would compute hardly more tokens a second", dearer / _WORTH)
        return None

    tokens, found = double(min(max(LEAST, least), most), most, objection)
    return StepTokens(tokens, found or _NO_OBJECTION)


def shorten_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> StepTokens:
    """For a GPU: `most`, halved until a step is short enough, and at least `least`. step_s: as above."""
    least = min(max(LEAST, least), most)
    tokens, reason = most, _NO_OBJECTION
    while tokens > least and step_s(tokens) > _LONG_STEP_S:
        reason = f"a step of {tokens} would take more than {_LONG_STEP_S * 1e3:.0f} ms"
        tokens = max(least, tokens // 2)
    return StepTokens(tokens, reason)
