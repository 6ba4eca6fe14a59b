"""Speculative decoding by prompt lookup: guesses of a request's next tokens from its own text, without a model.

Where the newest tokens have occurred before, what followed then is the guess (Saxena, "Prompt Lookup Decoding", 2023).
Edits, quotes, code and repetitive text are guessed well; elsewhere guesses are rare.

Decides what is guessed and how likely it is to be right. Whether a guess is right is the runner's to find out:
it samples after every guessed token as if there were no guesses, and what is sampled counts.
"""

from collections.abc import Sequence

from serve_app.core.config import SchedulerKnobs

MAX_MATCH = 4
"""Newest tokens that are looked up together; where these have not occurred before, fewer."""
_PRIOR = (0.1, 0.3, 0.5, 0.5)
"""How often guesses after a match of 1, 2, ... tokens are right, until more is known. Low where a wrong one costs."""
_WEIGHT = 0.1
"""Of the newest guess in the mean."""
_SPECULATION_TOKENS = 6
"""Decode tokens of a step, drafts among them: with the 8-bit kernel the next one costs as much as a step of one."""

_MAX_FORCED = 16
"""Drafts of one row that its grammar leaves no choice about: each is computed once, now or in a later step."""


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
        self._match = 0  # tokens that the guess was found by
        self._chances = [0.0, *_PRIOR]  # by the length of the match

    def propose(self, token_ids: Sequence[int], at_most: int, min_chance: float) -> tuple[int, ...]:
        """Tokens that probably follow `token_ids` (all that are known, prompt first; the caller only ever appends).

        Up to `at_most` tokens, while the probability that all of them are right is at least `min_chance`.
        """
        self._learn(token_ids)
        self._index(token_ids)
        self._guess = self._look_up(token_ids, at_most + 1)
        self._guessed_from = len(token_ids)
        match, count, chance = self._match, 0, 1.0
        while count < min(at_most, len(self._guess)):
            chance *= self._chances[match]
            if chance < min_chance:
                break
            count += 1
            match = min(match + 1, MAX_MATCH)
        return self._guess[:count]

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last guess with what came: moving means of how often guesses are right. A right one makes the
        match that the next is found by one longer."""
        match = self._match
        for guess, token_id in zip(self._guess, token_ids[self._guessed_from :], strict=False):
            self._chances[match] += _WEIGHT * ((guess == token_id) - self._chances[match])
            if guess != token_id:
                return
            match = min(match + 1, MAX_MATCH)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that ended since the last call; not those that end the text, which are to be looked up."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for begin in range(max(0, end - MAX_MATCH), end):
                self._follower[tuple(token_ids[begin:end])] = end
        self._num_indexed = len(token_ids)

    def _look_up(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """The `count` tokens after the last occurrence of as many of the newest tokens as possible; or nothing."""
        end = len(token_ids)
        for match in range(min(MAX_MATCH, end), 0, -1):
            begin = self._follower.get(tuple(token_ids[end - match :]))
            if begin is not None:
                self._match = match
                # Where the text since then is shorter than the guess, it is taken to go round once more.
                return tuple(token_ids[begin + i % (end - begin)] for i in range(count))
        return ()


def max_drafts(knobs: SchedulerKnobs, num_decodes: int) -> int:
    """The most draft tokens for each of `num_decodes` rows; together they take at most half of a step's tokens."""
    if knobs.speculation == "off" or num_decodes == 0:
        return 0
    return max(0, min(_SPECULATION_TOKENS, knobs.max_num_batched_tokens // 2) // num_decodes - 1)


def forced_drafts(knobs: SchedulerKnobs, room: int) -> int:
    """Draft tokens that a decode may have of those that its grammar leaves no choice about; `room`: tokens left."""
    return 0 if knobs.speculation == "off" else max(0, min(_MAX_FORCED, room))
