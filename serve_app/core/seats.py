"""The number of slots for `max_num_seqs: auto`.

Uses measurements taken at start: as many slots as KV pool and step time allow. Pure: it measures nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.doubling import Objection, double

LEAST, MOST = 16, 256
SEQUENCE_TOKENS = 256
"""Assumed tokens per sequence in the KV pool: a chat's prompt and answer. Longer ones may wait for blocks."""
_LONGEST_STEP_S = 0.2
"""Longest step of decodes: each stream then advances 5 times a second, about reading speed. Fewer slots would make
streams faster and let other requests wait seconds for their first token."""
_DEAREST_ROW = 1.25
"""Highest cost of an added row relative to the rows before. More rows reduce TTFT, but must not delay the last token.
Above 1, since measured steps vary by 10 %."""


@dataclass(frozen=True, slots=True)
class Seats:
    """The chosen number of slots, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"max_num_seqs={self.number} ({self.reason})"


def most_seats(max_num_batched_tokens: int) -> int:
    """Upper limit: half of a step's tokens, so that prompts fit beside decodes."""
    return min(MOST, max(LEAST, max_num_batched_tokens // 2), max_num_batched_tokens)


def choose_seats(most: int, pool_tokens: int, step_s: Callable[[int], float] | None) -> Seats:
    """The number of slots, from 16 to `most` (fewer if `most` is).

    pool_tokens: size of the KV pool. step_s: measures a step of this many decodes, in seconds, on each call; None if
    the number hardly matters, as on a GPU.
    """
    limit, reason = most, "the rest of a step is for prompts" if most < MOST else "more are not worth it"
    if (room := max(LEAST, pool_tokens // SEQUENCE_TOKENS)) < limit:
        limit, reason = room, f"the KV pool has {pool_tokens} tokens"
    if step_s is None:
        return Seats(limit, reason)

    def objection(rows: int, more: int) -> Objection | None:
        seconds, longer = step_s(rows), step_s(more)
        if longer > _LONGEST_STEP_S:
            return Objection(f"a step of {more} would take {longer * 1e3:.0f} ms", longer / _LONGEST_STEP_S)
        dearer = (longer - seconds) / (more - rows) * rows / seconds
        if dearer > _DEAREST_ROW:
            return Objection(f"{more} would give fewer tokens per second", dearer / _DEAREST_ROW)
        return None

    rows, found = double(min(LEAST, limit), limit, objection)
    return Seats(rows, found or reason)
