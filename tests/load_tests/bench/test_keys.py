"""The figures and verdicts about keys; the servers that they come from are measured by hand."""

from datetime import UTC, datetime
from typing import Any

import pytest

from load_tests.bench.keys import cost_faults, share_faults, share_figures

START = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()


def results(tok_s: float, first_ms: float, failures: int = 0) -> dict[str, dict[str, Any]]:
    run = {"failures": failures, "wrong_length": 0, "output_tok_s": tok_s, "ttft_ms": {"p50": first_ms}}
    return {name: {"median": run, "runs": [run]} for name in ("decode", "first_token")}


@pytest.mark.parametrize(
    ("with_keys", "faults"),
    [
        (results(991.0, 10.29), []),
        (results(980.0, 10.0), ["decode: 2.0% slower"]),
        (results(1000.0, 10.5), ["first token: 0.50 ms later"]),
        (results(1000.0, 10.0, failures=1), [f"{n}: requests failed or had the wrong length" for n in results(0, 0)]),
    ],
)
def test_what_keys_may_cost(with_keys: dict[str, Any], faults: list[str]) -> None:
    assert cost_faults(results(1000.0, 10.0), with_keys) == faults


def line(key: str, arrived: float, tokens: int, seconds: float = 2.0) -> dict[str, Any]:
    ended = datetime.fromtimestamp(START + arrived + seconds, UTC).isoformat(timespec="milliseconds")
    return {"key": key, "time": ended, "seconds": seconds, "prompt_tokens": tokens - 1, "output_tokens": 1}


def test_shares_are_counted_by_when_requests_came() -> None:
    """A minute's limit holds for the requests that come in it, whenever they end."""
    lines = [line("light", at, 10) for at in range(100)] + [line("heavy", at, 20) for at in range(100)]
    lines += [line("limited", at, 300, seconds=50 - at) for at in (0, 1)]
    lines += [line("limited", at, 300) for at in (61, 62)] + [line("(internal)", 0, 6)]
    figures = share_figures(lines, 120)
    assert figures["requests"] == {"light": 100, "heavy": 100, "limited": 4}
    assert (figures["heavy_over_light"], figures["limited_tokens_per_minute"]) == (2.0, 600.0)
    assert figures["limited_most_in_a_minute"] == 600
    assert share_faults(figures) == []
    assert share_figures([], 120)["limited_most_in_a_minute"] == 0


def test_the_verdict_names_what_was_not_kept() -> None:
    figures = {"heavy_over_light": 1.8, "limited_tokens_per_minute": 500.0, "limited_most_in_a_minute": 640}
    assert share_faults(figures) == [
        "heavy got 1.8 times what light got, not 2",
        "the limited key got 500.0 of 600 tokens a minute",
        "the limited key got 640 tokens in a minute",
    ]
