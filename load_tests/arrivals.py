"""When open-loop requests arrive and how long they are: random processes, and traces of real services.

Decides times and lengths only; `workloads` gives each arrival a text. A trace is a CSV file in one of two layouts, told
apart by the header:

    BurstGPT                  Timestamp (seconds), Request tokens, Response tokens; other columns are ignored
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
    """One request that is due `at_s` seconds after the start, with its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int

    def clipped(self, max_prompt_tokens: int, max_output_tokens: int) -> "Arrival":
        """The same arrival with lengths that a server with a short context takes."""
        prompt_tokens = min(self.prompt_tokens, max_prompt_tokens)
        return replace(self, prompt_tokens=prompt_tokens, output_tokens=min(self.output_tokens, max_output_tokens))


def mixed_lengths(rng: Random) -> tuple[int, int]:
    """Prompt tokens, log-uniform in 16..512, and output tokens, exponential with mean 64 in 4..256."""
    prompt = round(math.exp(rng.uniform(math.log(16), math.log(512))))
    output = round(rng.expovariate(1 / 64.0))
    return min(512, max(16, prompt)), min(256, max(4, output))


def random_arrivals(rng: Random, rate: float, duration_s: float, variation: float = 1.0) -> Iterator[Arrival]:
    """Arrivals at `rate` per second with mixed lengths; the gaps between them are Gamma-distributed.

    `variation` is the gaps' coefficient of variation (standard deviation over mean): 1 is a Poisson process, more
    comes in bursts. Services for language models have been seen well above 1 (BurstGPT, arXiv:2401.17644).
    """
    shape = variation**-2
    at_s = rng.gammavariate(shape, 1 / (shape * rate))
    while at_s <= duration_s:
        yield Arrival(at_s, *mixed_lengths(rng))
        at_s += rng.gammavariate(shape, 1 / (shape * rate))


def read_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """The first `limit` arrivals of a trace file, from time 0 on, `speed` times as fast as they really came.

    Rows without a prompt or an answer (requests that failed) are left out.
    Raises `ValueError` for another header and, with the line's number, for a row that is no arrival.
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
    """Seconds of a number, or of a date and time (Azure's have seven decimals, of which a microsecond is kept)."""
    if "-" not in moment:
        return float(moment)
    date = datetime.fromisoformat(moment)
    # Without a zone it is UTC: in local time an hour of the trace might come twice.
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
