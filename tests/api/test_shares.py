"""Open-loop load of three keys on the whole HTTP API, on a clock that jumps: shares by weight, a
limit that is held."""

import asyncio
import selectors
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.api.service import NO_CONTEXT, RequestContext
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.tenants.accounts import Accounts
from serve_app.tenants.keys import KeyRing, hash_key
from serve_app.tenants.ledger import Ledger, read_ledger
from serve_app.tenants.tenant import Tenant
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService
from tests.api.test_accounts import EVER

LIMIT = 600
TENANTS = (
    Tenant(name="light", weight=1),
    Tenant(name="heavy", weight=2),
    Tenant(name="limited", weight=4, tokens_per_minute=LIMIT),
)
RATES = {"light": 1.2, "heavy": 1.8, "limited": 1.8}
"""Requests a second; the first two keys alone send more than the slots can serve."""
SLOTS, QUEUED, STEP_S = 8, 24, 0.4
SECONDS = 3 * 61
START = 1_790_000_000.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: when all tasks wait, its clock jumps to the next moment that something is
    due."""

    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class TimedService(ScriptedService):
    """Takes `STEP_S` for each token."""

    async def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        async with aclosing(super().generate(request, context)) as steps:
            async for deltas in steps:
                await asyncio.sleep(STEP_S)
                yield deltas


@dataclass
class Load:
    http: httpx.AsyncClient
    loop: asyncio.AbstractEventLoop
    answers: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: {name: [] for name in RATES})
    """By key: when each request that was answered arrived, and the tokens of its usage."""
    ended: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in RATES})
    refusals: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in RATES})

    async def ask(self, key: str) -> None:
        at = self.loop.time()
        body = {"prompt": [1, 2, 3], "max_tokens": 12}
        answer = await self.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        if answer.status_code == 200:
            self.answers[key].append((at, answer.json()["usage"]["total_tokens"]))
            self.ended[key].append(self.loop.time())
        else:
            assert answer.status_code == 429
            self.refusals[key].add(answer.json()["error"]["code"])

    async def arrive(self, key: str, seed: int) -> None:
        random = Random(seed)
        async with asyncio.TaskGroup() as tasks:
            while self.loop.time() < SECONDS:
                tasks.create_task(self.ask(key))
                await asyncio.sleep(random.expovariate(RATES[key]))


async def offer(tokenizer: Tokenizer, folder: Path) -> tuple[Load, Accounts]:
    loop = asyncio.get_running_loop()
    accounts = Accounts(
        Ledger(folder, lambda: START + loop.time()), clock=loop.time, wall_clock=lambda: START + loop.time()
    )
    queue = AsyncAdmissionQueue(SLOTS, QUEUED, clock=loop.time)
    ring = KeyRing({hash_key(tenant.name): tenant for tenant in TENANTS})
    app = create_app(
        TimedService(tokenizer), queue, make_limits(), Recorder(), access=Access(lambda: ring), accounts=accounts
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        load = Load(http, loop)
        async with asyncio.TaskGroup() as tasks:
            for seed, key in enumerate(RATES):
                tasks.create_task(load.arrive(key, seed))
    assert (queue.ongoing, queue.queued) == (0, 0)
    return load, accounts


def most_within(seconds: float, charges: list[tuple[float, int]]) -> int:
    """The most that was charged within so many seconds, wherever they begin."""
    return max(sum(n for at, n in charges if begin <= at < begin + seconds) for begin, _ in charges)


def test_a_limit_is_used_up_and_held_and_the_rest_is_shared_by_weight(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        load, accounts = runner.run(offer(tokenizer, tmp_path))
    limited = load.answers["limited"]
    assert most_within(60, limited) <= LIMIT
    assert sum(tokens for _, tokens in limited) >= 0.95 * LIMIT * SECONDS / 60
    assert load.refusals["limited"] == {"rate_limit_exceeded"}
    # From when both queue, until the first of the requests still waiting at the end.
    light, heavy = (sum(30 <= at < SECONDS for at in load.ended[key]) for key in ("light", "heavy"))
    assert abs(heavy / light / 2 - 1) <= 0.05
    assert load.refusals["light"] | load.refusals["heavy"] == {"queue_full", "queue_share"}
    for tenant in TENANTS:
        usage: dict[str, Any] = accounts.usage(tenant)
        assert usage["today"]["reserved_tokens"] == usage["sequences"] == 0
    lines = [entry for _, entry in read_ledger(tmp_path, *EVER)]
    for key, answers in load.answers.items():
        told = [line["prompt_tokens"] + line["output_tokens"] for line in lines if line["key"] == key]
        assert sorted(told) == sorted(tokens for _, tokens in answers)
