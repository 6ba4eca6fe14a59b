"""What makes a chaos measurement end with status 1."""

from typing import Any

import pytest

from load_tests.chaos import kill_loop, overload, profile_share, soak_report
from load_tests.chaos.soak_report import Sample

KILL_LOOP = {"failed": 0, "lost_tokens": 0, "doubled_tokens": 0, "unequal": 0, "killed": 30}
OVERLOAD = {
    "seconds": 300.0,
    "tok_s_of_peak": 0.8,
    "first_tries": {"429 typed error": 90, "200 complete": 10},
    "refused": 90,
    "refused_with_429": 90,
    "with_retry_after": 90,
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
        ({"with_retry_after": 89}, "refusals without Retry-After: 1"),
        ({"longest_retry_after_s": 61}, "was 61 s, more than 60 s"),
        ({"longest_retry_after_s": None}, "no refusal had a Retry-After"),
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


SOAK = {
    "failed": 0,
    "lost_tokens": 0,
    "doubled_tokens": 0,
    "unequal": 0,
    "seconds": 3600.0,
    "broken": [],
    "updates": [(600.0, "deployed")],
    "growths": {"proxy": {"rss_mib": 1.05, "fds": 1.0, "threads": None}},
}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"unequal": 1}, "1 unequal"),
        ({"updates": [(600.0, "deployment failed")]}, "an update ended with 'deployment failed'"),
        ({"broken": ["NotInTimeError()"]}, "the run itself broke: NotInTimeError()"),
        ({"growths": {"proxy": {"rss_mib": 1.06}}}, "proxy: rss_mib grew by 6.0%"),
        ({"growths": {}, "seconds": 60.0}, "a run of 60 s does not show how the processes grow"),
    ],
)
def test_the_soak(changed: dict[str, Any], fault: str) -> None:
    assert soak_report.verdict(SOAK | changed) == ([fault] if fault else [])


def held(role: str, pid: int, born: int, until: int, rss_mib: float, per_s: float) -> list[Sample]:
    """A process that holds `per_s` MiB more every second."""
    return [Sample(at, role, pid, at - born, rss_mib + per_s * (at - born), 9, 3) for at in range(born, until, 5)]


def test_growth_is_that_of_one_process_or_of_its_successors_at_equal_age() -> None:
    """A replica that is always younger later on has not shrunk, and one that grows with age alone
    is no leak."""
    samples = [
        *held("controller", 1, 0, 3600, 100, 0.1),
        *held("proxy", 2, 0, 3600, 100, 0),
        *held("replica", 3, 800, 1700, 100, 0.1),
        *held("replica", 4, 1700, 2600, 100, 0.1),
        *held("ingress", 5, 900, 1900, 100, 0),
        *held("ingress", 6, 1900, 3600, 120, 0),
    ]
    grown = soak_report.growths(sorted(samples, key=lambda sample: sample.at_s))
    mib = {role: told["rss_mib"] for role, told in grown.items()}
    assert mib["controller"] is not None
    assert mib.pop("controller") == pytest.approx((100 + 0.1 * 3150) / (100 + 0.1 * 1350), rel=0.01)
    assert mib == pytest.approx({"proxy": 1.0, "replica": 1.0, "ingress": 1.2}, rel=0.01)
    assert soak_report.growths([]) == {}
