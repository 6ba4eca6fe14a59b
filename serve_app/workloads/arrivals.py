"""Arrival times and lengths of open-loop requests: random processes, and traces of real services.

`mixes` adds the texts. A trace is a CSV file in one of two layouts, recognized by its header:

    BurstGPT                  Timestamp (seconds), Request tokens, Response tokens; other columns
    are ignored
    Azure LLM inference       TIMESTAMP (date and time), ContextTokens, GeneratedTokens
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request due `at_s` seconds after the start, with its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int

    def clipped(self, max_prompt_tokens: int, max_output_tokens: int) -> "Arrival":
        """Return the arrival with its lengths cut to these limits, for short contexts."""
        prompt_tokens = min(self.prompt_tokens, max_prompt_tokens)
        return replace(self, prompt_tokens=prompt_tokens, output_tokens=min(self.output_tokens, max_output_tokens))


def mixed_lengths(rng: Random) -> tuple[int, int]:
    """Return prompt and output tokens.

    Prompt: log-uniform in 16..512. Output: exponential with mean 64, in 4..256.
    """
    prompt = round(math.exp(rng.uniform(math.log(16), math.log(512))))
    output = round(rng.expovariate(1 / 64.0))
    return min(512, max(16, prompt)), min(256, max(4, output))


def crowd_lengths(rng: Random) -> tuple[int, int]:
    """Return prompt tokens, uniform in 20..120, and output tokens, uniform in 16..96.

    Models short questions of many users.
    """
    return rng.randint(20, 120), rng.randint(16, 96)


def lognormal_lengths(rng: Random) -> tuple[int, int]:
    """Return log-normal prompt and output tokens.

    Prompt: median 128, sigma 1.0, in 16..1536. Output: median 64, sigma 0.7, in 4..256.
    """
    prompt = round(rng.lognormvariate(math.log(128), 1.0))
    output = round(rng.lognormvariate(math.log(64), 0.7))
    return min(1536, max(16, prompt)), min(256, max(4, output))


def random_arrivals(rng: Random, rate: float, duration_s: float, variation: float = 1.0) -> Iterator[Arrival]:
    """Yield arrivals at `rate` per second with mixed lengths and Gamma-distributed gaps.

    `variation` is the gaps' coefficient of variation (standard deviation over mean): 1 is a Poisson
    process, higher is burstier. Values well above 1 have been observed for language model services
    (BurstGPT, arXiv:2401.17644).
    """
    shape = variation**-2
    at_s = rng.gammavariate(shape, 1 / (shape * rate))
    while at_s <= duration_s:
        yield Arrival(at_s, *mixed_lengths(rng))
        at_s += rng.gammavariate(shape, 1 / (shape * rate))


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """Return the first `limit` arrivals of a trace file, starting at time 0, sped up by `speed`.

    Skips rows without prompt or output tokens (failed requests). Raises `ValueError` for an unknown
    header and, with the line number, for a malformed row.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        columns = next((names for names in (_BURSTGPT, _AZURE) if set(names) <= set(rows.fieldnames or ())), None)
        if columns is None:
            raise ValueError(f"{path}: the header has neither {', '.join(_BURSTGPT)} nor {', '.join(_AZURE)}")
        arrivals: list[Arrival] = []
        for row in rows:
            try:
                moment, prompt_tokens, output_tokens = (row[column] for column in columns)
                arrival = Arrival(_seconds(moment), int(prompt_tokens), int(output_tokens))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
            if arrival.prompt_tokens > 0 and arrival.output_tokens > 0:
                arrivals.append(arrival)
            if limit is not None and len(arrivals) == limit:
                break
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return [replace(arrival, at_s=(arrival.at_s - arrivals[0].at_s) / speed) for arrival in arrivals]


def _seconds(moment: str) -> float:
    """Parse seconds from a number, or from a date and time.

    Azure's seven decimals are cut to microseconds.
    """
    if "-" not in moment:
        return float(moment)
    date = datetime.fromisoformat(moment)
    # A time without a zone is taken as UTC. In local time, an hour may occur twice when the clocks
    # change.
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
