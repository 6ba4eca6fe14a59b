"""Speculation by prompt lookup: drafts from the request's own text, without a draft model.

If the newest tokens occurred before, the tokens that followed are the draft (Saxena, "Prompt Lookup
Decoding", 2023). This works well for edits, quotes, code and repetitive text; elsewhere drafts are
rare. Decides the drafts and their acceptance probability. The runner verifies drafts: it samples
after every draft token as if there were no drafts, and the sampled tokens count.
"""

from array import array
from collections.abc import Sequence

MAX_MATCH = 4
"""Maximum number of newest tokens that are matched against earlier text."""
_PRIOR = (0.1, 0.3, 0.5, 0.5)
"""Initial acceptance rates after a match of 1, 2, ... tokens.

Low for short matches, where errors cost.
"""
_WEIGHT = 0.1
"""Weight of the newest draft token in the moving average."""
_MOST_CANDIDATES = 64
"""Maximum number of earlier positions compared, because some token pairs are frequent."""


class PromptLookup:
    """The drafts of one choice.

    Learns acceptance rates from the choice's tokens, even when no draft was computed, so that it
    notices early when text begins to repeat.
    """

    def __init__(self) -> None:
        # End of the last occurrence of a token and of a token pair; and for each end of a pair, the
        # end of its previous occurrence.
        self._token_end: dict[int, int] = {}
        self._pair_end: dict[tuple[int, int], int] = {}
        self._earlier = array("l", (0, 0))
        self._num_indexed = 0
        self._guess: tuple[int, ...] = ()
        self._guessed_from = 0
        self._match = 0  # length of the match that gave the guess
        self._chances = [0.0, *_PRIOR]  # by length of the match

    def propose(self, token_ids: Sequence[int], at_most: int, min_chance: float) -> tuple[int, ...]:
        """Return tokens that probably follow `token_ids`.

        `token_ids`: all known tokens, prompt first; the caller may only append to them. Returns up
        to `at_most` tokens, while the probability that all of them are right is at least
        `min_chance`.
        """
        self._learn(token_ids)
        self._index(token_ids)
        begin = self._look_up(token_ids)
        if begin is None:
            self._guess = ()
            return ()
        count = self._num_likely(at_most, min_chance)
        # One more than is returned, to learn whether it would have been right.
        self._guess = _continuation(token_ids, begin, count + 1)
        self._guessed_from = len(token_ids)
        return self._guess[:count]

    def _num_likely(self, at_most: int, min_chance: float) -> int:
        """Return how many draft tokens after the current match are likely enough together."""
        match, count, chance = self._match, 0, 1.0
        while count < at_most:
            chance *= self._chances[match]
            if chance < min_chance:
                break
            count += 1
            match = min(match + 1, MAX_MATCH)
        return count

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last draft with the new tokens and update the moving acceptance rates.

        An accepted draft token makes the next match one token longer.
        """
        match = self._match
        for guess, token_id in zip(self._guess, token_ids[self._guessed_from :], strict=False):
            self._chances[match] += _WEIGHT * ((guess == token_id) - self._chances[match])
            if guess != token_id:
                return
            match = min(match + 1, MAX_MATCH)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index the tokens since the last call, except the text's end, which is looked up next."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            self._token_end[token_ids[end - 1]] = end
            if end > 1:
                pair = token_ids[end - 2], token_ids[end - 1]
                self._earlier.append(self._pair_end.get(pair, 0))
                self._pair_end[pair] = end
        self._num_indexed = len(token_ids)

    def _look_up(self, token_ids: Sequence[int]) -> int | None:
        """Return where the last occurrence of the longest match with the newest tokens ended."""
        self._match = 1
        found = self._token_end.get(token_ids[-1]) if token_ids else None
        end = self._pair_end.get((token_ids[-2], token_ids[-1]), 0) if len(token_ids) > 1 else 0
        for _ in range(_MOST_CANDIDATES):
            if not end or self._match == MAX_MATCH:
                break
            match = _match(token_ids, end)
            if match > self._match:
                self._match, found = match, end
            end = self._earlier[end]
        return found


def _match(token_ids: Sequence[int], end: int) -> int:
    """Return how many newest tokens equal those before `end`, up to `MAX_MATCH`.

    Two are already known to be equal.
    """
    match = 2
    while match < min(MAX_MATCH, end) and token_ids[end - 1 - match] == token_ids[-1 - match]:
        match += 1
    return match


def _continuation(token_ids: Sequence[int], begin: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `begin` on. If the text ends before, repeats it from `begin`."""
    end = len(token_ids)
    if begin + count <= end:
        return tuple(token_ids[begin : begin + count])
    return tuple(token_ids[begin + i % (end - begin)] for i in range(count))
