"""Limits and the ledger as clients meet them: reserved at admission, settled at the end, told in
headers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.api.request_events import Outcome, RequestSummary
from serve_app.errors import EngineError
from serve_app.observability.metrics import IngressMetrics
from serve_app.tenants.accounts import Accounts
from serve_app.tenants.keys import KeyRing, hash_key
from serve_app.tenants.ledger import Ledger, read_ledger
from serve_app.tenants.tenant import Tenant
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService
from tests.text.formats import tokenizer_of

EVER = (date(2000, 1, 1), date(9999, 1, 1))
PROMPT = [1, 2, 3]
TENANTS = [
    Tenant(name="free"),
    Tenant(name="minute", tokens_per_minute=100, requests_per_minute=50, max_sequences=20),
    Tenant(name="many", tokens_per_minute=100_000, requests_per_minute=200, max_sequences=20),
    Tenant(name="few", requests_per_minute=2),
    Tenant(name="narrow", max_sequences=2),
    Tenant(name="day", tokens_per_day=100),
]


@dataclass
class Charged:
    http: httpx.AsyncClient
    service: ScriptedService
    queue: AsyncAdmissionQueue
    observer: Recorder
    accounts: Accounts
    folder: Path
    summaries: list[RequestSummary]

    async def ask(self, key: str, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 4, **fields}
        return await self.http.post("/v1/completions", json=body, headers={"x-api-key": key})

    async def usage(self, key: str) -> dict[str, Any]:
        return dict((await self.http.get("/v1/usage", headers={"x-api-key": key})).json())

    def ledger(self) -> list[dict[str, Any]]:
        return [entry for _, entry in read_ledger(self.folder, *EVER)]


@pytest.fixture
async def server(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Charged]:
    service, queue, observer = ScriptedService(tokenizer), AsyncAdmissionQueue(300, 300), Recorder()
    accounts, summaries = Accounts(Ledger(tmp_path)), []  # type: tuple[Accounts, list[RequestSummary]]
    ring = KeyRing({hash_key(tenant.name): tenant for tenant in TENANTS})
    app = create_app(
        service,
        queue,
        make_limits(),
        observer,
        log=summaries.append,
        access=Access(lambda: ring, allow_anonymous=True),
        accounts=accounts,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield Charged(http, service, queue, observer, accounts, tmp_path, summaries)


async def test_the_ledger_says_what_usage_said(server: Charged) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"n": 3},
        {"prompt": [PROMPT, [4, 5]]},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stop": ["capital"], "max_tokens": 50},
        {"n": 2, "best_of": 4},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"prompt_logprobs": 1, "max_tokens": 0},
        {"max_tokens": -1, "logprobs": 5},
        {"ignore_eos": True, "min_tokens": 4, "stop": ["Paris"]},
    ]
    told = []
    for fields in asked:
        answer = await server.ask("free", **fields)
        assert answer.status_code == 200
        if "stream" in fields:
            last = answer.text.split("data: ")[-2]
            told.append(httpx.Response(200, text=last).json()["usage"])
        else:
            told.append(answer.json()["usage"])
    lines = server.ledger()
    assert [
        (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"], line["outcome"]) for line in lines
    ] == [
        (
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            "completed",
        )
        for usage in told
    ]
    assert {(line["key"], line["model"], line["revision"]) for line in lines} == {("free", "scripted", "fp_scripted")}
    assert [line["request_id"] for line in lines] == [summary.request_id for summary in server.summaries]
    assert {summary.key for summary in server.summaries} == {"free"}
    today = (await server.usage("free"))["today"]
    assert (today["requests"], today["output_tokens"]) == (
        len(asked),
        sum(usage["completion_tokens"] for usage in told),
    )
    assert [charge[0] for charge in server.observer.charges] == ["free"] * len(asked)


async def test_headers_tell_what_is_left_and_a_refusal_when_to_come_back(server: Charged) -> None:
    first = await server.ask("minute", max_tokens=60, stop=["Paris"])
    used = first.json()["usage"]["total_tokens"]
    assert used < 20
    headers = {name[12:]: value for name, value in first.headers.items() if name.startswith("x-ratelimit-")}
    assert {name: value for name, value in headers.items() if "reset" not in name} == {
        "limit-requests": "50",
        "remaining-requests": "49",
        "limit-tokens": "100",
        "remaining-tokens": "37",
    }, "as reserved, for what comes is not known yet"
    assert all(0 < float(headers[f"reset-{kind}"][:-1]) <= 61 for kind in ("requests", "tokens"))
    assert (await server.ask("minute", max_tokens=97 - used)).status_code == 200, "what was not used was given back"
    while (refused := await server.ask("minute", max_tokens=90)).status_code == 200:
        pass  # the reply is shorter than what may come
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 93
    assert server.observer.refusals == ["rate_limit_exceeded"]
    assert (server.queue.ongoing, server.queue.queued) == (0, 0)
    never = await server.ask("minute", max_tokens=98)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
    assert "x-ratelimit-limit-tokens" not in (await server.ask("free")).headers


async def test_the_ledger_tells_the_reasoning_as_usage_does(server: Charged) -> None:
    server.service.tokenizer = tokenizer_of("qwen3")
    server.service.reply = "<think>\nRome.\nHm.\n</think>\n\nSunny."
    told = []
    for path, fields in (
        ("chat/completions", {}),
        ("chat/completions", {"n": 2, "max_tokens": 5}),
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("responses", {"input": "Hello"}),
    ):
        body = {"messages": [{"role": "user", "content": "Hello"}]} if path != "responses" else {}
        answer = await server.http.post(f"/v1/{path}", json=body | fields, headers={"x-api-key": "free"})
        usage = answer.json()["usage"]
        details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        told.append(details.get("reasoning_tokens", 0))
    lines = server.ledger()
    assert [line["reasoning_tokens"] for line in lines] == told
    assert told[0] == told[3] > 5
    assert told[1:3] == [lines[1]["output_tokens"], 0]
    assert (await server.usage("free"))["today"]["reasoning_tokens"] == sum(told)


async def test_a_stream_tells_the_headers_too(server: Charged) -> None:
    answer = await server.ask("minute", stream=True)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "93")


async def test_requests_are_counted(server: Charged) -> None:
    assert [(await server.ask("few")).status_code for _ in range(3)] == [200, 200, 429]
    assert (await server.ask("free")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_tokenizing_is_no_way_around_the_number_of_requests(
    server: Charged, path: str, body: dict[str, Any]
) -> None:
    async def statuses(key: str) -> list[int]:
        posts = [await server.http.post(path, json=body, headers={"x-api-key": key}) for _ in range(3)]
        return [post.status_code for post in posts]

    assert await statuses("few") == [200, 200, 429]
    assert await statuses("free") == [200, 200, 200]
    assert (await server.ask("few")).status_code == 429
    assert (await server.usage("few"))["sequences"] == 0


async def test_sequences_at_once_are_bounded_while_they_run(server: Charged) -> None:
    server.service.hold = asyncio.Event()
    running = asyncio.create_task(server.ask("narrow", n=2))
    while not server.service.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await server.ask("narrow")).status_code == 429
    assert (await server.ask("narrow", n=3)).status_code == 400
    assert (await server.ask("narrow", best_of=3)).status_code == 400
    server.service.hold.set()
    assert (await running).status_code == 200
    assert (await server.ask("narrow", n=2)).status_code == 200


async def test_a_days_tokens_end(server: Charged) -> None:
    statuses = []
    while not statuses or statuses[-1] == 200:
        answer = await server.ask("day", max_tokens=20, ignore_eos=True)
        statuses.append(answer.status_code)
    error = answer.json()["error"]
    assert (error["code"], answer.status_code) == ("insufficient_quota", 429)
    assert 1 <= int(answer.headers["retry-after"]) <= 86_400
    today = (await server.usage("day"))["today"]
    assert 100 - 23 < today["prompt_tokens"] + today["output_tokens"] <= 100
    assert today["reserved_tokens"] == 0


async def test_two_hundred_cancelled_streams_give_everything_back(server: Charged) -> None:
    """Each had its prompt of three tokens computed, and one token."""
    server.service.hold = asyncio.Event()
    for _ in range(10):
        tasks = [asyncio.create_task(server.ask("many", max_tokens=200, stream=True)) for _ in range(20)]
        while server.service.running < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while server.service.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
    usage = await server.usage("many")
    assert (usage["sequences"], usage["today"]["reserved_tokens"]) == (0, 0)
    assert (server.queue.ongoing, server.queue.queued) == (0, 0)
    lines = server.ledger()
    assert {line["outcome"] for line in lines} == {"cancelled"}
    assert len(lines) == 200
    assert sum(line["prompt_tokens"] + line["output_tokens"] for line in lines) == usage["last_minute"]["tokens"] == 800


async def test_what_fails_without_a_token_costs_nothing(server: Charged) -> None:
    server.service.error, server.service.error_at = EngineError("broken"), 0
    assert (await server.ask("free")).status_code == 500
    assert (await server.ask("free", temperature=9)).status_code == 400
    assert server.ledger() == []
    server.service.error_at = 2
    assert (await server.ask("free")).status_code == 500
    (line,) = server.ledger()
    assert (line["outcome"], line["prompt_tokens"], line["output_tokens"]) == ("failed", 3, 2)
    usage = await server.usage("free")
    assert (usage["sequences"], usage["last_minute"]["tokens"]) == (0, 5)
    assert [charge[1:] for charge in server.observer.charges] == [
        (Outcome.FAILED, 0, 0, 0),
        (Outcome.INVALID, 0, 0, 0),
        (Outcome.FAILED, 3, 1, 2),
    ]


async def test_strangers_are_in_the_ledger_without_a_name(server: Charged) -> None:
    answer = await server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
    assert answer.status_code == 200
    assert [line["key"] for line in server.ledger()] == [""]
    assert (await server.http.get("/v1/usage")).json()["key"] is None


def test_metrics_name_keys_and_nobody_else() -> None:
    metrics = IngressMetrics(lambda: 0, lambda: 0)
    metrics.charged("team", "completed", 10, 4, 7)
    metrics.charged("", "completed", 10, 4, 7)
    metrics.charged("(internal)", "completed", 10, 4, 7)
    value: Callable[..., float | None] = metrics.registry.get_sample_value
    kinds = ("prompt", "cached", "output")
    tokens = [value("serve_app_key_tokens_total", {"key": "team", "kind": kind}) for kind in kinds]
    assert tokens == [10, 4, 7]
    assert value("serve_app_key_requests_total", {"key": "team", "outcome": "completed"}) == 1
    names = {sample.labels.get("key") for family in metrics.registry.collect() for sample in family.samples}
    assert names == {None, "team"}
