"""The requests of the experiments: real prompts, and output lengths drawn from an exponential distribution.

The published experiment draws a mean of 128 output tokens and cuts at up to 1,536. Here everything is a quarter of
that, which a laptop finishes in minutes; what matters is the spread of the lengths, which stays the same.
"""

import math
from random import Random
from typing import TYPE_CHECKING, Any

from serve_app.experiments.compare import PROMPTS
from serve_app.experiments.compare_runs import CompareJob
from serve_app.workloads.arrivals import Arrival

if TYPE_CHECKING:
    from serve_app.text.tokenizer import Tokenizer

MEAN = 32
"""Mean of the exponential distribution, in tokens, before it is cut."""


def exponential_lengths(count: int, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Output tokens of `count` requests: exponential with mean `MEAN`, at least 1, at most `cap`.

    The same draws whatever the cap, so that a higher one only lengthens what a lower one had cut.
    """
    rng = Random(seed)
    return tuple(min(cap, max(1, round(rng.expovariate(1 / MEAN)))) for _ in range(count))


def make_job(tokenizer: "Tokenizer", count: int, cap: int, slots: int, **fields: Any) -> CompareJob:
    """`count` requests whose server only knows that none is longer than `cap`.

    The KV memory is what `slots` requests of the greatest length need; `fields` are those of `CompareJob`.
    """
    ids = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    prompts = tuple(ids[index % len(ids)] for index in range(count))
    context = max(len(prompt) for prompt in prompts) + cap
    return CompareJob(
        prompts, exponential_lengths(count, cap), slots, context=context, kv_positions=slots * context, **fields
    )


def poisson_arrivals(count: int, rate: float, cap: int, prompts: tuple[int, int], seed: int = 0) -> list[Arrival]:
    """`count` requests at `rate` a second: prompts log-uniform between two lengths, outputs as above.

    The same requests in the same order at any rate; only the gaps between them are stretched.
    """
    rng = Random(f"arrivals-{seed}")
    shortest, longest = map(math.log, prompts)
    at_s = 0.0
    arrivals = []
    for length in exponential_lengths(count, cap, seed):
        at_s += rng.expovariate(1.0) / rate
        arrivals.append(Arrival(at_s, round(math.exp(rng.uniform(shortest, longest))), length))
    return arrivals
