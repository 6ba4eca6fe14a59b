"""How likely a model is to give each of some answers, and no other, to a prompt.

Decides what is asked of an engine (the log-probabilities of each answer's tokens behind the prompt) and what follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.core.sampling_params import SamplingParams
from serve_app.grammars import check_has_end
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Odds:
    """One answer. logprob: of its tokens and of the end behind them; probability: of it among the answers."""

    answer: str
    logprob: float
    probability: float


def answer_tokens(tokenizer: Tokenizer, answers: Sequence[str], end_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Each answer as the tokenizer writes it, and behind it the first of the model's tokens that end a text.

    Raises `InvalidRequestError` if there are none.
    """
    check_has_end(end_ids, "odds")
    return [(*tokenizer.encode(answer, add_special_tokens=False), end_ids[0]) for answer in answers]


def scoring_params(num_prompt_tokens: int) -> SamplingParams:
    """For a request whose prompt is a prompt of so many tokens and then an answer's: the answer's log-probabilities.

    The prompt may come out of the prefix cache. The one token that an engine gives in any case means nothing.
    """
    return SamplingParams(
        max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, prompt_logprobs_from=num_prompt_tokens
    )


def odds(answers: Sequence[str], logprobs: Sequence[Sequence[float]]) -> list[Odds]:
    """From the log-probabilities of each answer's tokens."""
    sums = [math.fsum(each) for each in logprobs]
    best = max(sums)
    weights = [math.exp(value - best) for value in sums]
    whole = math.fsum(weights)
    return [Odds(a, p, weight / whole) for a, p, weight in zip(answers, sums, weights, strict=True)]
