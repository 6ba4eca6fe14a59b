"""Limits of one tenant: reserved, settled, given back; what is refused and when to come back."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import ConfigError, InvalidRequestError, OverloadedError
from serve_app.tenants.accounts import Accounts, Charge
from serve_app.tenants.keys import check_limits, hash_key, parse_keys
from serve_app.tenants.ledger import Ledger, Spent
from serve_app.tenants.tenant import Tenant

TEN_PM = 1_790_000_000.0 // 86_400 * 86_400 + 22 * 3600


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make(ledger: Ledger | None = None) -> tuple[Accounts, Clock]:
    clock = Clock(1000.0)
    return Accounts(ledger, clock, Clock(TEN_PM)), clock


def spent(prompt: int, output: int, key: str = "team") -> Spent:
    return Spent(key, "tiny", "fp", "id", "chat", "completed", prompt, 0, output, 0, 1.0)


def begun(accounts: Accounts, tenant: Tenant, tokens: int, sequences: int = 1) -> Charge:
    charge = accounts.open(tenant)
    charge.begin(sequences)
    charge.reserve(tokens)
    return charge


def test_a_request_reserves_the_most_and_gives_back_the_rest() -> None:
    accounts, clock = make()
    tenant = Tenant(name="team", tokens_per_minute=100)
    charge = begun(accounts, tenant, 90)
    clock.now += 1
    second = accounts.open(tenant)
    second.begin(1)
    with pytest.raises(OverloadedError, match=r"100 tokens per minute; try again in 60 seconds") as refusal:
        second.reserve(11)
    assert (refusal.value.code, refusal.value.retry_after_s) == ("rate_limit_exceeded", 60.0)
    second.settle(None)
    charge.settle(spent(10, 5))
    assert charge.headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "85",
        "x-ratelimit-reset-tokens": "60s",
    }
    begun(accounts, tenant, 85)


def test_what_can_never_fit_is_the_requests_fault() -> None:
    accounts, _ = make()
    tenant = Tenant(name="team", tokens_per_minute=100, max_sequences=3)
    with pytest.raises(InvalidRequestError, match="may use 101 tokens.*allows 100 per minute") as refusal:
        begun(accounts, tenant, 101)
    assert (refusal.value.param, refusal.value.code) == ("max_tokens", "request_exceeds_limit")
    with pytest.raises(InvalidRequestError, match="is 4, but this API key allows 3 at once"):
        accounts.open(tenant).begin(4)


def test_requests_of_a_minute_and_sequences_at_once_are_counted() -> None:
    accounts, clock = make()
    tenant = Tenant(name="team", requests_per_minute=3, max_sequences=4)
    charges = [begun(accounts, tenant, 10, sequences=2) for _ in range(2)]
    with pytest.raises(OverloadedError, match="4 sequences at once"):
        accounts.open(tenant).begin(1)
    charges[0].settle(None)
    third = begun(accounts, tenant, 10)
    assert third.headers()["x-ratelimit-remaining-requests"] == "0"
    third.settle(None)
    clock.now += 12.5
    with pytest.raises(OverloadedError, match="3 requests per minute; try again in 48 seconds") as refusal:
        accounts.open(tenant).begin(1)
    assert refusal.value.retry_after_s == 48.5
    clock.now += 48.5
    accounts.open(tenant).begin(1)


def test_a_days_tokens_go_on_after_a_restart(tmp_path: Path) -> None:
    wall = Clock(TEN_PM)
    tenant = Tenant(name="team", tokens_per_day=100)
    accounts = Accounts(Ledger(tmp_path, wall), Clock(0.0), wall)
    begun(accounts, tenant, 60).settle(spent(10, 20))
    open_ended = begun(accounts, tenant, 40)
    with pytest.raises(OverloadedError, match="100 tokens per day and has 30 left; the request may use 31") as no:
        begun(accounts, tenant, 31)
    assert (no.value.code, no.value.retry_after_s) == ("insufficient_quota", 2 * 3600)
    del open_ended, accounts
    accounts = Accounts(Ledger(tmp_path, wall), Clock(0.0), wall)
    with pytest.raises(OverloadedError, match="has 70 left"):
        begun(accounts, tenant, 71)
    begun(accounts, tenant, 70)
    wall.now += 2 * 3600
    with pytest.raises(OverloadedError, match="has 30 left"):
        begun(accounts, tenant, 31)


def test_usage_tells_what_was_used_and_what_is_allowed(tmp_path: Path) -> None:
    wall = Clock(TEN_PM)
    accounts = Accounts(Ledger(tmp_path, wall), Clock(0.0), wall)
    tenant = Tenant(name="team", tokens_per_day=100)
    begun(accounts, tenant, 60).settle(spent(10, 20))
    begun(accounts, tenant, 15, sequences=2)
    limits = {"max_sequences": None, "requests_per_minute": None, "tokens_per_minute": None, "tokens_per_day": 100}
    assert accounts.usage(tenant) == {
        "object": "usage",
        "key": "team",
        "today": {
            "date": "2026-09-21",
            "requests": 1,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "output_tokens": 20,
            "reasoning_tokens": 0,
            "reserved_tokens": 15,
        },
        "last_minute": {"requests": 2, "tokens": 45},
        "sequences": 2,
        "limits": limits,
    }
    assert make()[0].usage(Tenant(name=""))["today"] is None


REQUEST = st.tuples(st.integers(1, 120), st.floats(0, 1), st.floats(0, 30), st.sampled_from(["end", "fail", "stay"]))


@given(st.lists(REQUEST, max_size=40))
def test_nothing_is_left_over_and_no_limit_is_passed(requests: list[tuple[int, float, float, str]]) -> None:
    accounts, clock = make()
    tenant = Tenant(name="team", tokens_per_minute=100, requests_per_minute=10, max_sequences=5)
    staying: list[Charge] = []
    for tokens, part, gap, fate in requests:
        clock.now += gap
        charge = accounts.open(tenant)
        try:
            charge.begin(1)
            charge.reserve(tokens)
        except (OverloadedError, InvalidRequestError):
            charge.settle(None)
        else:
            if fate == "stay":
                staying.append(charge)
            else:
                charge.settle(spent(0, int(part * tokens)) if fate == "end" else None)
        state: dict[str, Any] = accounts.usage(tenant)
        assert state["last_minute"]["tokens"] <= 100
        assert state["last_minute"]["requests"] <= 10
        assert state["sequences"] == len(staying) <= 5
    for charge in staying:
        charge.settle(None)
    clock.now += 61
    after = accounts.usage(tenant)
    assert (after["sequences"], after["last_minute"]) == (0, {"requests": 0, "tokens": 0})


def test_daily_limits_want_a_ledger() -> None:
    ring = parse_keys(f"a: {{sha256: {hash_key('a')}, tokens_per_day: 5}}")
    check_limits(ring, has_ledger=True)
    with pytest.raises(ConfigError, match="a: `tokens_per_day` needs `ingress.ledger_folder`"):
        check_limits(ring, has_ledger=False)
