"""What makes a chaos measurement end with status 1."""

from typing import Any

import pytest

from load_tests.chaos import kill_loop, overload, profile_share

KILL_LOOP = {"failed": 0, "lost_tokens": 0, "doubled_tokens": 0, "unequal": 0, "killed": 30}
OVERLOAD = {
    "seconds": 300.0,
    "tok_s_of_peak": 0.8,
    "first_tries": {"429 typed error": 90, "200 complete": 10},
    "refused": 90,
    "refused_with_429": 90,
    "told_when_to_come_back": 90,
    "longest_retry_after_s": 60,
    "memory_growth": 0.02,
}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"failed": 2}, "2 failed"),
        ({"lost_tokens": 3}, "3 lost tokens"),
        ({"doubled_tokens": 1}, "1 doubled tokens"),
        ({"unequal": 1}, "1 unequal"),
        ({"killed": 0}, "no replica was killed"),
    ],
)
def test_the_kill_loop(changed: dict[str, Any], fault: str) -> None:
    assert kill_loop.verdict(KILL_LOOP | changed) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"tok_s_of_peak": 0.79}, "79.0% of the peak"),
        ({"refused": 91}, "1 first tries ended neither"),
        ({"told_when_to_come_back": 89}, "1 were refused without Retry-After"),
        ({"longest_retry_after_s": 61}, "after 61 s, more than 60"),
        ({"longest_retry_after_s": None}, "no client was told"),
        ({"memory_growth": 0.03}, "memory grew by 3.0%"),
        ({"memory_growth": None, "seconds": 20.0}, "a run of 20 s"),
    ],
)
def test_overload(changed: dict[str, Any], fault: str) -> None:
    faults = overload.verdict(OVERLOAD | changed)
    assert len(faults) == bool(fault)
    assert fault in "".join(faults)


@pytest.mark.parametrize(("share", "reached"), [(0.01, True), (0.0101, False)])
def test_what_failover_costs(share: float, reached: bool) -> None:
    assert (profile_share.verdict({"failover": {"share": share}}) == []) is reached
