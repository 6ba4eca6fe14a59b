"""Sums of requests, and the counts in a ledger's line."""

from dataclasses import astuple, dataclass
from typing import Any

import orjson

MAX_COUNT = 2**53 - 1
"""Of a line: the largest integer that every reader of JSON takes exactly. Sums may be larger."""
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(slots=True)
class Totals:
    """Sums of requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def tokens(self) -> int:
        """What counts against limits."""
        return self.prompt_tokens + self.output_tokens

    def add(self, line: dict[str, Any]) -> None:
        """Count one line of a ledger, or a `Spent` as a dict. A line with `requests` is the sum of so many."""
        self.requests += line.get("requests", 1)
        self.prompt_tokens += line["prompt_tokens"]
        self.cached_tokens += line["cached_tokens"]
        self.output_tokens += line["output_tokens"]
        self.reasoning_tokens += line.get("reasoning_tokens", 0)  # older lines have none

    def without(self, other: "Totals") -> "Totals":
        """What these have beyond `other`; 0 where that has more."""
        return Totals(*(max(0, ours - theirs) for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def plus(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def for_one_line(self) -> "Totals":
        """As much of these as one line may have."""
        return Totals(*(min(count, MAX_COUNT) for count in astuple(self)))


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A request's line that was written whole; None for what is left of another, or was never one of ours."""
    entry = parse_object(line)
    if not isinstance(entry.get("key"), str):
        return None
    counts = [entry.get("requests", 1), entry.get("reasoning_tokens", 0), *(entry.get(name) for name in _COUNTS)]
    return entry if all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts) else None


def parse_object(line: bytes) -> dict[str, Any]:
    """A line's JSON object; empty where it has none."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}
