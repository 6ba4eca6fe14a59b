"""How many sequences run at once where the settings leave that to the engine (`max_num_seqs: auto`).

Decides by what was measured at start: as many as the KV pool holds and steps bear. Pure: it measures nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.doubling import Objection, double

LEAST, MOST = 16, 256
SEQUENCE_TOKENS = 256
"""What a sequence is taken to have in the KV pool: a chat's prompt and answer. Longer ones may wait for blocks."""
_LONGEST_STEP_S = 0.2
"""Of decodes alone, so that each stream goes on 5 times a second, about as fast as people read. Fewer seats would make
streams faster, and the rest of a crowd wait whole seconds for a first token."""
_DEAREST_ROW = 1.25
"""More rows may cost so many times what those before cost each: they answer a crowd sooner, but must not make it wait
longer for its last token. Above 1, since a measured step may take a tenth longer than the next one."""


@dataclass(frozen=True, slots=True)
class Seats:
    """A number of sequences, and what kept it from being larger."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} sequences at once: {self.reason}"


def most_seats(max_num_batched_tokens: int) -> int:
    """As many as may be chosen: with half of a step's tokens, so that prompts come along beside decodes."""
    return min(MOST, max(LEAST, max_num_batched_tokens // 2), max_num_batched_tokens)


def choose_seats(most: int, pool_tokens: int, step_s: Callable[[int], float] | None) -> Seats:
    """At most `most`, and 16 where these are no more.

    pool_tokens: what the KV pool holds. step_s: measures a step of so many decodes, in seconds, each time it is asked;
    None: steps of any number take about as long, as on a GPU.
    """
    limit, reason = most, "that leaves prompts their part of a step" if most < MOST else "no more are worth it"
    if (room := max(LEAST, pool_tokens // SEQUENCE_TOKENS)) < limit:
        limit, reason = room, f"the KV pool holds {pool_tokens} tokens"
    if step_s is None:
        return Seats(limit, reason)

    def objection(rows: int, more: int) -> Objection | None:
        seconds, longer = step_s(rows), step_s(more)
        if longer > _LONGEST_STEP_S:
            return Objection(f"a step of {more} would take {longer * 1e3:.0f} ms", longer / _LONGEST_STEP_S)
        dearer = (longer - seconds) / (more - rows) * rows / seconds
        if dearer > _DEAREST_ROW:
            return Objection(f"{more} would give fewer tokens a second", dearer / _DEAREST_ROW)
        return None

    rows, found = double(min(LEAST, limit), limit, objection)
    return Seats(rows, found or reason)
