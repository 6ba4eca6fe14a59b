"""What the engine chooses by itself when it starts, by the times of its steps: slots, tokens of a step, drafts.

`choose_slots` says how many sequences run at once (`max_num_seqs: auto`): as many as the KV pool holds and steps bear.
`choose_step_tokens` and `shorten_step_tokens` say how many tokens a step has at most (`max_num_batched_tokens: auto`):
the more, the less each costs, and the longer all streams wait for it.
`measure_draft_cost` says how likely a draft token must be to be right, to be worth its time. A right draft saves a row
of a later step, which is worth that row's share of the step; right or wrong, a draft makes this step longer. So where
a step reads its weights for few rows, unlikely drafts pay; where rows are all that it computes, only nearly certain
ones do.

Pure: it measures nothing itself.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_DOUBLING_TRIES = 5
_CERTAIN = 2.0
"""A step so many times longer than borne needs no confirmation: a disturbance makes hardly any so much longer."""
MIN_SLOTS, MAX_SLOTS = 16, 256
SEQUENCE_TOKENS = 256
"""What a sequence is taken to have in the KV pool: a chat's prompt and answer. Longer ones may wait for blocks."""
_LONGEST_DECODE_S = 0.2
"""Of decodes alone, so that each stream goes on 5 times a second, about as fast as people read. Fewer slots would make
streams faster, and the rest of a crowd wait whole seconds for a first token."""
_DEAREST_ROW = 1.25
"""More rows may cost so many times what those before cost each: they answer a crowd sooner, but must not make it wait
longer for its last token. Above 1, since a measured step may take a tenth longer than the next one."""
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 128, 8192
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
_SLOTS, _STEP_TOKENS = "sequences at once", "tokens in a step at most"
_DRAFT_ROWS = (1, 16)
"""Numbers of decodes that are measured, beside the most that may run at once."""
_DRAFT_TOKENS = 8
"""A measured step with drafts has about so many tokens, and at least a draft for each row."""
_DRAFT_TRIES = 3
"""Their difference is small, and either may be longer for once."""
_LONGEST_DRAFTED_S = 0.2
"""After a step that takes longer, a start has no time for another or a larger one."""
_MIN_SHARE = 0.01
"""Of a decode's share, what a draft costs at least, whatever noise made of the measurement."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of `what`, and what kept it from being larger."""

    number: int
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.number} {self.what}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Objection:
    """What speaks against a number, and how many times longer than borne its step is."""

    reason: str
    excess: float


def double(number: int, most: int, objection: Callable[[int, int], Objection | None]) -> tuple[int, str | None]:
    """The largest of `number`, twice that and so on up to `most` to which there is no objection, and the reason of the
    objection to more; None at `most`.

    objection: by the steps of both numbers, measured now, what keeps the first from becoming the second. Once is not
    enough: a machine that is disturbed makes steps longer than they are, never shorter.
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
    """As many as may be chosen: with half of a step's tokens, so that prompts come along beside decodes."""
    return min(MAX_SLOTS, max(MIN_SLOTS, max_num_batched_tokens // 2), max_num_batched_tokens)


def choose_slots(most: int, pool_tokens: int, step_s: Callable[[int], float] | None) -> Size:
    """At most `most`, and 16 where these are no more.

    pool_tokens: what the KV pool holds. step_s: measures a step of so many decodes, in seconds, each time it is asked;
    None: steps of any number take about as long, as on a GPU.
    """
    limit, reason = most, "that leaves prompts their part of a step" if most < MAX_SLOTS else _NO_OBJECTION
    if (room := max(MIN_SLOTS, pool_tokens // SEQUENCE_TOKENS)) < limit:
        limit, reason = room, f"the KV pool holds {pool_tokens} tokens"
    if step_s is None:
        return Size(limit, _SLOTS, reason)

    def objection(rows: int, more: int) -> Objection | None:
        seconds, longer = step_s(rows), step_s(more)
        if longer > _LONGEST_DECODE_S:
            return Objection(f"a step of {more} would take {longer * 1e3:.0f} ms", longer / _LONGEST_DECODE_S)
        dearer = (longer - seconds) / (more - rows) * rows / seconds
        if dearer > _DEAREST_ROW:
            return Objection(f"{more} would give fewer tokens a second", dearer / _DEAREST_ROW)
        return None

    rows, found = double(min(MIN_SLOTS, limit), limit, objection)
    return Size(rows, _SLOTS, found or reason)


def choose_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> Size:
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

    tokens, found = double(min(max(MIN_STEP_TOKENS, least), most), most, objection)
    return Size(tokens, _STEP_TOKENS, found or _NO_OBJECTION)


def shorten_step_tokens(least: int, most: int, step_s: Callable[[int], float]) -> Size:
    """For a GPU: `most`, halved until a step is short enough, and at least `least`. step_s: as above."""
    least = min(max(MIN_STEP_TOKENS, least), most)
    tokens, reason = most, _NO_OBJECTION
    while tokens > least and step_s(tokens) > _LONG_STEP_S:
        reason = f"a step of {tokens} would take more than {_LONG_STEP_S * 1e3:.0f} ms"
        tokens = max(least, tokens // 2)
    return Size(tokens, _STEP_TOKENS, reason)


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
