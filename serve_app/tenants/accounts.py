"""Limits and usage of tenants. A request reserves its maximum and returns what it did not use.

The windows of a minute are in memory, so they are per process: several ingresses would need shared
windows. The ledger has the sums of a day.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from serve_app.errors import InvalidRequestError, OverloadedError
from serve_app.tenants.ledger import Ledger, Spent
from serve_app.tenants.rate_window import RateWindow
from serve_app.tenants.tenant import Tenant
from serve_app.tenants.totals import Totals

_DAY_S = 86_400
_PLACE_S = 1.0
"""`Retry-After` in seconds while the key's own requests use all its slots."""


class _Account:
    """Current usage of one tenant."""

    def __init__(self) -> None:
        self.requests = RateWindow()
        self.tokens = RateWindow()
        self.sequences = 0
        self.reserved = 0


class Accounts:
    """All tenants' accounts, by name.

    Not thread-safe: use it on one event loop. No method waits.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: monotonic. wall_clock: Unix time. Both in seconds."""
        self.clock = clock
        self.wall_clock = wall_clock
        self.ledger = ledger
        self._accounts: dict[str, _Account] = {}

    def open(self, tenant: Tenant) -> "Charge":
        """Return the charge for one request."""
        return Charge(self, tenant, self._account(tenant))

    def usage(self, tenant: Tenant) -> dict[str, Any]:
        """Return usage and limits of `tenant`, for `GET /v1/usage`."""
        account, now = self._account(tenant), self.clock()
        today = self.today(tenant)
        return {
            "object": "usage",
            "key": tenant.name or None,
            "today": None
            if today is None
            else {
                "date": f"{datetime.fromtimestamp(self.wall_clock(), UTC):%Y-%m-%d}",
                "requests": today.requests,
                "prompt_tokens": today.prompt_tokens,
                "cached_tokens": today.cached_tokens,
                "output_tokens": today.output_tokens,
                "reasoning_tokens": today.reasoning_tokens,
                "reserved_tokens": account.reserved,
            },
            "last_minute": {"requests": account.requests.total(now), "tokens": account.tokens.total(now)},
            "sequences": account.sequences,
            "limits": {name: getattr(tenant, name) for name in LIMITS},
        }

    def today(self, tenant: Tenant) -> Totals | None:
        """Return today's usage from the ledger; None without a ledger."""
        return None if self.ledger is None else self.ledger.today(tenant.name)

    def _account(self, tenant: Tenant) -> _Account:
        return self._accounts.setdefault(tenant.name, _Account())


LIMITS = ("max_sequences", "requests_per_minute", "tokens_per_minute", "tokens_per_day")


class Charge:
    """One request on its tenant's account.

    Call `begin`, then `reserve` once the prompt is known. Always call `settle`.
    """

    def __init__(self, accounts: Accounts, tenant: Tenant, account: _Account) -> None:
        self._accounts = accounts
        self._tenant = tenant
        self._account = account
        self._sequences = 0
        self._reserved = 0
        self._second = 0

    @property
    def key(self) -> str:
        """The name of the tenant's key; empty without a known key."""
        return self._tenant.name

    def begin(self, sequences: int) -> None:
        """Count the request and its concurrent sequences. With 0 sequences `settle` is not needed.

        Raises `OverloadedError` or `InvalidRequestError`.
        """
        tenant, account, now = self._tenant, self._account, self._accounts.clock()
        if tenant.max_sequences is not None:
            if sequences > tenant.max_sequences:
                raise InvalidRequestError(
                    f"prompts times `n` is {sequences}, but this API key allows {tenant.max_sequences} at once",
                    param="n",
                )
            if account.sequences + sequences > tenant.max_sequences:
                raise _exceeded(f"{tenant.max_sequences} sequences at once", _PLACE_S)
        if tenant.requests_per_minute is not None:
            wait = account.requests.wait_s(1, tenant.requests_per_minute, now)
            if wait > 0:
                raise _exceeded(f"{tenant.requests_per_minute} requests per minute", wait)
        account.requests.charge(1, now)
        account.sequences += sequences
        self._sequences = sequences

    def reserve(self, tokens: int) -> None:
        """Reserve the maximum: prompts and the longest outputs. Raises as `begin` does."""
        tenant, account, now = self._tenant, self._account, self._accounts.clock()
        for limit, period in ((tenant.tokens_per_minute, "minute"), (tenant.tokens_per_day, "day")):
            if limit is not None and tokens > limit:
                raise InvalidRequestError(
                    f"the request may use {tokens} tokens (prompt plus `max_tokens`), but this API key allows {limit} "
                    f"per {period}",
                    param="max_tokens",
                    code="request_exceeds_limit",
                )
        if tenant.tokens_per_minute is not None:
            wait = account.tokens.wait_s(tokens, tenant.tokens_per_minute, now)
            if wait > 0:
                raise _exceeded(f"{tenant.tokens_per_minute} tokens per minute", wait)
        self._check_day(tokens)
        self._second = account.tokens.charge(tokens, now)
        account.reserved += tokens
        self._reserved = tokens

    def settle(self, spent: Spent | None) -> None:
        """End the request: return unused tokens, and write it to the ledger if anything was
        computed."""
        account = self._account
        used = 0 if spent is None else spent.prompt_tokens + spent.output_tokens
        account.tokens.give_back(self._reserved - used, self._second)
        account.reserved -= self._reserved
        account.sequences -= self._sequences
        self._reserved = self._sequences = 0
        if spent is not None and self._accounts.ledger is not None:
            self._accounts.ledger.write(spent)

    def headers(self) -> Mapping[str, str]:
        """Return OpenAI's headers with the limits per minute."""
        now, headers = self._accounts.clock(), {}
        for kind, limit, window in (
            ("requests", self._tenant.requests_per_minute, self._account.requests),
            ("tokens", self._tenant.tokens_per_minute, self._account.tokens),
        ):
            if limit is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(limit - window.total(now), 0))
                headers[f"x-ratelimit-reset-{kind}"] = f"{window.reset_s(now):.3g}s"
        return headers

    def _check_day(self, tokens: int) -> None:
        limit, today = self._tenant.tokens_per_day, self._accounts.today(self._tenant)
        if limit is None or today is None:
            return
        left = limit - today.tokens - self._account.reserved
        if tokens > left:
            raise OverloadedError(
                f"this API key allows {limit} tokens per day and has {max(left, 0)} left; the request may use {tokens} "
                "(prompt plus `max_tokens`)",
                code="insufficient_quota",
                retry_after_s=_DAY_S - self._accounts.wall_clock() % _DAY_S,
            )


def _exceeded(limit: str, wait_s: float) -> OverloadedError:
    return OverloadedError(
        f"this API key allows {limit}; try again in {max(wait_s, 1.0):.0f} seconds",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
