"""Speculation by prompt lookup: drafts of a request's next tokens from its own text, without a model.

If the newest tokens have occurred before, the tokens that followed are the draft (Saxena, "Prompt Lookup Decoding",
2023). This works well for edits, quotes, code and repetitive text; elsewhere drafts are rare.

Decides the drafts and their acceptance probability. The runner verifies them: it samples after every draft token as if
there were no drafts, and the sampled tokens count.
"""

from array import array
from collections.abc import Sequence

MAX_MATCH = 4
"""Newest tokens that are looked up together; where these have not occurred before, fewer."""
_PRIOR = (0.1, 0.3, 0.5, 0.5)
"""How often guesses after a match of 1, 2, ... tokens are right, until more is known. Low where a wrong one costs."""
_WEIGHT = 0.1
"""Of the newest guess in the mean."""
_MOST_CANDIDATES = 64
"""Maximum number of earlier positions compared with the newest tokens, since some token pairs are frequent."""


class PromptLookup:
    """The guesses of one choice.

    Learns from its tokens alone: how often guesses were right is known also where none was computed, so that text which
    begins to repeat itself is noticed in time.
    """

    def __init__(self) -> None:
        # Where the last occurrence of a token, and of two, ended; and for each such end of two, the one before it.
        self._token_end: dict[int, int] = {}
        self._pair_end: dict[tuple[int, int], int] = {}
        self._earlier = array("l", (0, 0))
        self._num_indexed = 0
        self._guess: tuple[int, ...] = ()
        self._guessed_from = 0
        self._match = 0  # tokens that the guess was found by
        self._chances = [0.0, *_PRIOR]  # by the length of the match

    def propose(self, token_ids: Sequence[int], at_most: int, min_chance: float) -> tuple[int, ...]:
        """Tokens that probably follow `token_ids` (all that are known, prompt first; the caller only ever appends).

        Up to `at_most` tokens, while the probability that all of them are right is at least `min_chance`.
        """
        self._learn(token_ids)
        self._index(token_ids)
        begin = self._look_up(token_ids)
        if begin is None:
            self._guess = ()
            return ()
        count = self._num_likely(at_most, min_chance)
        # One more than is returned, to see whether it would have been right.
        self._guess = _continuation(token_ids, begin, count + 1)
        self._guessed_from = len(token_ids)
        return self._guess[:count]

    def _num_likely(self, at_most: int, min_chance: float) -> int:
        """How many guesses in a row are likely enough, after the match that was found."""
        match, count, chance = self._match, 0, 1.0
        while count < at_most:
            chance *= self._chances[match]
            if chance < min_chance:
                break
            count += 1
            match = min(match + 1, MAX_MATCH)
        return count

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last draft with the new tokens and update the moving acceptance rates. An accepted draft makes
        the next match one token longer."""
        match = self._match
        for guess, token_id in zip(self._guess, token_ids[self._guessed_from :], strict=False):
            self._chances[match] += _WEIGHT * ((guess == token_id) - self._chances[match])
            if guess != token_id:
                return
            match = min(match + 1, MAX_MATCH)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter what ended since the last call; not what ends the text, which is to be looked up."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            self._token_end[token_ids[end - 1]] = end
            if end > 1:
                pair = token_ids[end - 2], token_ids[end - 1]
                self._earlier.append(self._pair_end.get(pair, 0))
                self._pair_end[pair] = end
        self._num_indexed = len(token_ids)

    def _look_up(self, token_ids: Sequence[int]) -> int | None:
        """Where the last occurrence of as many of the newest tokens as possible ended."""
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
    """How many of the newest tokens are those before `end`, of which two are known to be, up to `MAX_MATCH`."""
    match = 2
    while match < min(MAX_MATCH, end) and token_ids[end - 1 - match] == token_ids[-1 - match]:
        match += 1
    return match


def _continuation(token_ids: Sequence[int], begin: int, count: int) -> tuple[int, ...]:
    """The `count` tokens from `begin` on; where the text is shorter, it is taken to go round once more."""
    end = len(token_ids)
    if begin + count <= end:
        return tuple(token_ids[begin : begin + count])
    return tuple(token_ids[begin + i % (end - begin)] for i in range(count))
