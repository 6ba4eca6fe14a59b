"""Computes the probability of each of several answers to a prompt.

Decides what the engine computes (log-probabilities of each answer's tokens after the prompt) and
how to combine it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.core.sampling_params import SamplingParams
from serve_app.grammars import check_has_end
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Odds:
    """One answer.

    logprob: sum over its tokens and the end token. probability: normalized over answers.
    """

    answer: str
    logprob: float
    probability: float


def answer_tokens(tokenizer: Tokenizer, answers: Sequence[str], end_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens of each answer, followed by the model's first end token.

    Raises `InvalidRequestError` if the model has no end token.
    """
    check_has_end(end_ids, "odds")
    return [(*tokenizer.encode(answer, add_special_tokens=False), end_ids[0]) for answer in answers]


def scoring_params(num_prompt_tokens: int) -> SamplingParams:
    """Return parameters for the log-probabilities of an answer after a prompt of this many tokens.

    The prompt may come from the prefix cache. The engine still samples one token, which is ignored.
    """
    return SamplingParams(
        max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, prompt_logprobs_from=num_prompt_tokens
    )


def odds(answers: Sequence[str], logprobs: Sequence[Sequence[float]]) -> list[Odds]:
    """Return the odds of the answers from the log-probabilities of their tokens."""
    sums = [math.fsum(each) for each in logprobs]
    best = max(sums)
    weights = [math.exp(value - best) for value in sums]
    whole = math.fsum(weights)
    return [Odds(a, p, weight / whole) for a, p, weight in zip(answers, sums, weights, strict=True)]
