"""Sums of requests, and the counts in a ledger's line."""

from dataclasses import astuple, dataclass
from typing import Any

import orjson

MAX_COUNT = 2**53 - 1
"""Largest count in a line: the largest integer that all JSON parsers read exactly. Sums may be
larger."""
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
        """The tokens that count against limits."""
        return self.prompt_tokens + self.output_tokens

    def add(self, line: dict[str, Any]) -> None:
        """Add one line of a ledger, or a `Spent` as a dict.

        A line with `requests` is the sum of that many.
        """
        self.requests += line.get("requests", 1)
        self.prompt_tokens += line["prompt_tokens"]
        self.cached_tokens += line["cached_tokens"]
        self.output_tokens += line["output_tokens"]
        self.reasoning_tokens += line.get("reasoning_tokens", 0)  # missing in older lines

    def without(self, other: "Totals") -> "Totals":
        """Return the amounts beyond `other`'s, 0 where `other` has more."""
        return Totals(*(max(0, ours - theirs) for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def plus(self, other: "Totals") -> "Totals":
        """Return the sum of both."""
        return Totals(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def for_one_line(self) -> "Totals":
        """Return as much as fits in one line."""
        return Totals(*(min(count, MAX_COUNT) for count in astuple(self)))


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a request's line. Returns None if it is incomplete or not a ledger's line."""
    entry = parse_object(line)
    if not isinstance(entry.get("key"), str):
        return None
    counts = [entry.get("requests", 1), entry.get("reasoning_tokens", 0), *(entry.get(name) for name in _COUNTS)]
    return entry if all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts) else None


def parse_object(line: bytes) -> dict[str, Any]:
    """Return a line's JSON object; empty if there is none."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}
