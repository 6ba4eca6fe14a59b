"""Chooses slots, tokens per step and drafts at engine start, from measured step times.

`choose_slots` (`max_num_seqs: auto`): as many slots as KV pool and step time allow.

`choose_step_tokens` and `shorten_step_tokens` (`max_num_batched_tokens: auto`): with more tokens in
a step each token costs less, but all streams wait longer for the step.

`measure_draft_cost`: the acceptance probability from which a draft token is worth its time. An
accepted draft saves a row of a later step, which is worth that row's share of the step. Every draft
makes this step longer. In steps with few rows, limited by reading weights, even unlikely drafts are
worth it; in compute-bound steps only nearly certain drafts are.

Pure: it measures nothing itself.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_DOUBLING_TRIES = 5
_CERTAIN = 2.0
"""A step this many times over the limit is not measured again: noise is rarely that large."""
MIN_SLOTS, MAX_SLOTS = 16, 256
SEQUENCE_TOKENS = 256
"""Assumed tokens per sequence in the KV pool: a chat's prompt and answer.

Longer sequences may wait for blocks.
"""
_LONGEST_DECODE_S = 0.2
"""Longest step of decodes.

Each stream then advances 5 times a second, about reading speed. With fewer slots, streams would be
faster, but other requests would wait seconds for their first token.
"""
_DEAREST_ROW = 1.25
"""Highest cost of an added row, relative to the average cost of the existing rows.

More rows reduce TTFT, but must not delay the last token. Above 1, because measured steps vary by 10
%.
"""
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 128, 8192
_USUAL = 256
"""A larger step must not exceed `_SHORT_STEP_S`, the default interval between a stream's events."""
_SHORT_STEP_S = 0.05
_USUAL_STEP_S = 0.6
"""Steps of the usual size are chosen if they are at most this long.

Unmeasured benefits: prompts wait half as long for room next to decodes, twice as many tokens share
the reading of earlier keys, and drafts have room. The cost: every stream pauses this long while a
prompt is computed.
"""
_LONG_STEP_S = 0.1
"""Limit on a GPU, where a token costs about the same in steps of 1,000 and 8,000 tokens."""
_WORTH = 0.95
"""Highest relative cost per token at which doubling a step is worth it.

Below 1, because measured steps vary by a few percent.
"""

_NO_OBJECTION = "more are not worth it"
_SLOTS, _STEP_TOKENS = "max_num_seqs", "max_num_batched_tokens"
_DRAFT_ROWS = (1, 16)
"""Numbers of decodes that are measured, in addition to `max_num_seqs`."""
_DRAFT_TOKENS = 8
"""Approximate number of tokens in a measured step with drafts; each row has at least one draft."""
_DRAFT_TRIES = 3
"""Several tries, because the difference is small and either step may be disturbed."""
_LONGEST_DRAFTED_S = 0.2
"""After a longer step there is no time to measure another or a larger one."""
_MIN_SHARE = 0.01
"""Lower limit for the cost of a draft, as a fraction of a decode's share.

It protects against measurement noise.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The value chosen for a setting, and the reason."""

    number: int
    setting: str
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}={self.number} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a number is refused. `excess`: the ratio of the measured value to its limit."""

    reason: str
    excess: float


def double(number: int, most: int, objection: Callable[[int, int], Objection | None]) -> tuple[int, str | None]:
    """Double `number` up to `most` while there is no objection.

    Returns the number, and the reason of the objection to the next one (None at `most`).
    objection(number, more): measures steps of both and returns an objection to `more`, if any. It
    is called up to five times, because disturbances make steps longer, never shorter.
    """
    while number < most:
        more = min(2 * number, most)
        for _ in range(_DOUBLING_TRIES):
            found = objection(number, more)
            if found is None or found.excess >= _CERTAIN:
                break
        if found is not None:
            return number, found.reason
        number = more
    return number, None


def max_slots(max_num_batched_tokens: int) -> int:
    """Return the upper limit of slots: half of a step's tokens, so that prompts also fit."""
    return min(MAX_SLOTS, max(MIN_SLOTS, max_num_batched_tokens // 2), max_num_batched_tokens)


def choose_slots(most: int, pool_tokens: int, step_s: Callable[[int], float] | None) -> Size:
    """Return the number of slots: from 16 to `most`, or `most` if that is lower.

    pool_tokens: size of the KV pool. step_s: measures a step of this many decodes, in seconds, on
    each call; None if the number hardly matters, as on a GPU.
    """
    limit, reason = most, "the rest of a step is for prompts" if most < MAX_SLOTS else _NO_OBJECTION
    if (room := max(MIN_SLOTS, pool_tokens // SEQUENCE_TOKENS)) < limit:
        limit, reason = room, f"the KV pool has {pool_tokens} tokens"
    if step_s is None:
        return Size(limit, _SLOTS, reason)

    def objection(rows: int, more: int) -> Objection | None:
        seconds, longer = step_s(rows), step_s(more)
        if longer > _LONGEST_DECODE_S:
            return Objection(f"a step of {more} would take {longer * 1e3:.0f} ms", longer / _LONGEST_DECODE_S)
        dearer = (longer - seconds) / (more - rows) * rows / seconds
        if dearer > _DEAREST_ROW:
            return Objection(f"{more} would give fewer tokens per second", dearer / _DEAREST_ROW)
        return None

    rows, found = double(min(MIN_SLOTS, limit), limit, objection)
    return Size(rows, _SLOTS, found or reason)


def choose_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> Size:
    """Return the tokens per step for a CPU, from `least` to `most` (`most` if that is lower).

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

    tokens, found = double(min(max(MIN_STEP_TOKENS, least), most), most, objection)
    return Size(tokens, _STEP_TOKENS, found or _NO_OBJECTION)


def shorten_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> Size:
    """Return the tokens per step for a GPU: `most`, halved until a step is short enough.

    At least `least`. step_s: see `choose_step_tokens`.
    """
    least = min(max(MIN_STEP_TOKENS, least), most)
    tokens, reason = most, _NO_OBJECTION
    while tokens > least and step_s(tokens) > _LONG_STEP_S:
        reason = f"a step of {tokens} would take more than {_LONG_STEP_S * 1e3:.0f} ms"
        tokens = max(least, tokens // 2)
    return Size(tokens, _STEP_TOKENS, reason)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Step times by number of decodes, with and without drafts.

    A step of `rows[i]` decodes (ascending) takes `step_s[i]` seconds, each draft `draft_s[i]` more.
    Linear between two numbers of rows, constant beyond the last.
    """

    rows: Sequence[int] = (1,)
    step_s: Sequence[float] = (1.0,)
    draft_s: Sequence[float] = (0.1,)

    def __str__(self) -> str:
        chances = ", ".join(f"{self.least_chance(rows):.0%} beside {rows}" for rows in self.rows)
        return f"speculation: least acceptance probability of a draft: {chances} decodes (above 100%: no drafts)"

    def least_chance(self, num_decodes: int) -> float:
        """Return the lowest useful acceptance probability beside `num_decodes` >= 1 decodes.

        Above 1: no draft is useful.
        """
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
"""With overlap: a draft needs the token still being computed, which would end the overlap."""

FOR_FEW = DraftCost((1, 3, 4), (1.0, 1.0, 1.0), (0.05, 0.05, 1.0))
"""For devices whose steps are not measured.

Reading the weights dominates, and larger steps are launched in ways that do not support drafts.
"""


def measure_draft_cost(
    max_num_seqs: int, max_num_batched_tokens: int, step_s: Callable[[int, int], float]
) -> DraftCost:
    """Measure steps with and without drafts.

    step_s(decodes, drafts per decode): measures a step in seconds on each call; the last result
    counts.
    """
    rows: list[int] = []
    steps_s: list[float] = []
    drafts_s: list[float] = []
    for number in sorted({*(few for few in _DRAFT_ROWS if few < max_num_seqs), max_num_seqs}):
        drafts = max(1, _DRAFT_TOKENS // number - 1)
        if number * (1 + drafts) > max_num_batched_tokens:
            break
        for _ in range(_DRAFT_TRIES):
            plain, drafted = step_s(number, 0), step_s(number, drafts)
            if drafted > _LONGEST_DRAFTED_S:
                break
        rows.append(number)
        steps_s.append(plain)
        drafts_s.append(max(_MIN_SHARE * plain, (drafted - plain) / drafts) / number)
        if drafted > _LONGEST_DRAFTED_S:
            break
    return DraftCost(rows, steps_s, drafts_s) if rows else FOR_FEW
