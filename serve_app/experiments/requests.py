"""The experiments' requests: real prompts, and output lengths from an exponential distribution.

The published experiment uses a mean of 128 output tokens and a cap of up to 1,536. Here both are
divided by four, so that a laptop finishes in minutes. The relative spread of the lengths is the
same.
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
"""Mean of the exponential distribution before capping, in tokens."""


def exponential_lengths(count: int, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Return the output tokens of `count` requests: exponential with mean `MEAN`, at least 1, at
    most `cap`.

    The draws do not depend on the cap: a higher cap only lengthens outputs that a lower cap had
    cut.
    """
    rng = Random(seed)
    return tuple(min(cap, max(1, round(rng.expovariate(1 / MEAN)))) for _ in range(count))


def make_job(tokenizer: "Tokenizer", count: int, cap: int, slots: int, **fields: Any) -> CompareJob:
    """Return a job of `count` requests. The server knows only that no output is longer than `cap`.

    The KV memory fits `slots` requests of the maximum length. `fields`: fields of `CompareJob`.
    """
    ids = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    prompts = tuple(ids[index % len(ids)] for index in range(count))
    context = max(len(prompt) for prompt in prompts) + cap
    return CompareJob(
        prompts, exponential_lengths(count, cap), slots, context=context, kv_positions=slots * context, **fields
    )


def poisson_arrivals(count: int, rate: float, cap: int, prompts: tuple[int, int], seed: int = 0) -> list[Arrival]:
    """Return `count` requests at `rate` per second. Prompt lengths are log-uniform between two
    lengths; outputs come from `exponential_lengths`.

    The rate changes only the gaps between requests, not the requests or their order.
    """
    rng = Random(f"arrivals-{seed}")
    shortest, longest = map(math.log, prompts)
    at_s = 0.0
    arrivals = []
    for length in exponential_lengths(count, cap, seed):
        at_s += rng.expovariate(1.0) / rate
        arrivals.append(Arrival(at_s, round(math.exp(rng.uniform(shortest, longest))), length))
    return arrivals
