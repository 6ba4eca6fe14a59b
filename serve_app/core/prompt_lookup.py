"""Speculative decoding by prompt lookup: guesses of a request's next tokens from its own text, without a model.

Where the newest tokens have occurred before, what followed then is the guess (Saxena, "Prompt Lookup Decoding", 2023).
Edits, quotes, code and text that goes round in circles are guessed well; elsewhere guesses are rare.

Decides what is guessed and how much of it is worth a step's time. Whether a guess is right is the runner's to find out:
it samples after every guessed token as if there were no guesses, and what is sampled counts.
"""

from collections.abc import Sequence

NGRAM = 3
"""Newest tokens that must have occurred before."""
MIN_CHANCE = 0.2
"""The part of a step's time that one more token in a row costs at most: a guess less likely than that does not pay."""
_WEIGHT = 0.15
"""Of the newest guess in the mean."""


class PromptLookup:
    """The guesses of one choice.

    Learns from its tokens alone: how often guesses were right is known also where none was computed, so that text which
    begins to repeat itself is noticed in time.
    """

    def __init__(self) -> None:
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram -> where its last occurrence ended
        self._num_indexed = 0
        self._guess: tuple[int, ...] = ()
        self._guessed_from = 0
        self._acceptance = 0.5

    def propose(self, token_ids: Sequence[int], at_most: int) -> tuple[int, ...]:
        """Tokens that probably follow `token_ids` (all that are known, prompt first; the caller only ever appends).

        As many as pay, and `at_most` so many.
        """
        self._learn(token_ids)
        self._index(token_ids)
        end = len(token_ids)
        match = self._follower.get(tuple(token_ids[-NGRAM:]))
        self._guessed_from = end
        if match is None:
            self._guess = ()
            return ()
        # Where the text since the match is shorter than the guess, it is taken to go round once more.
        self._guess = tuple(token_ids[match + i % (end - match)] for i in range(at_most + 1))
        count, chance = 0, self._acceptance
        while count < at_most and chance >= MIN_CHANCE:
            count += 1
            chance *= self._acceptance
        return self._guess[:count]

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last guess with what came: a moving mean of how often a guess is right after right ones."""
        for guess, token_id in zip(self._guess, token_ids[self._guessed_from :], strict=False):
            self._acceptance += _WEIGHT * ((guess == token_id) - self._acceptance)
            if guess != token_id:
                return

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that ended since the last call, without the newest, which is the one to be looked up."""
        for end in range(max(self._num_indexed, NGRAM), len(token_ids)):
            self._follower[tuple(token_ids[end - NGRAM : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))
