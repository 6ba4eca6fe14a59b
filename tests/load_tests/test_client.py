"""The load generator against a small real HTTP server whose every event the test decides."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from load_tests.bench import find_model, run_repeats, warm_up
from load_tests.client import Objective, Run, Server, median_of, open_session, percentile, run_workload, send, summarize
from load_tests.workloads import PromptWriter, WorkItem, Workload

ITEM = WorkItem("one two three", 3, 4)
DONE = {"choices": [{"text": "", "finish_reason": "length"}]}


class WordTokenizer:
    """One token per word."""

    vocab_size = 1000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        number = token_ids[0]
        return "w" + "".join(chr(97 + number // 26**power % 26) for power in range(3))


WRITER = PromptWriter(WordTokenizer())


class FakeServer:
    """Answers completions with the events that `script(body)` gives, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.script: Callable[[dict[str, Any]], list[Any]] = answer
        self.arrivals = asyncio.Semaphore(0)
        self.hold: asyncio.Event | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.arrivals.release()
        events = self.script(body)
        if isinstance(events[0], int):
            self.at_once -= 1
            return web.json_response({"error": {"message": "no"}}, status=events[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            if self.hold is not None:
                await self.hold.wait()
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self.at_once -= 1
        return response


def token(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None}]}


def answer(body: dict[str, Any]) -> list[Any]:
    count = body["max_tokens"]
    usage = {"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": len(body["prompt"].split())}}
    return [*(token("word ") for _ in range(count)), DONE, usage, "[DONE]"]


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, Server]]:
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    app.router.add_get("/v1/models", models)
    async with TestServer(app) as running:
        yield server, Server(str(running.make_url("/")), "tiny", timeout_s=10)


async def one(server: Server, item: WorkItem = ITEM) -> Any:
    async with open_session(server) as session:
        return await send(session, server, item, WRITER.count)


async def test_a_good_answer_is_counted_by_usage(fake: tuple[FakeServer, Server]) -> None:
    result = await one(fake[1])
    assert result.error is None
    assert (result.output_tokens, result.prompt_tokens) == (4, 3)
    assert len(result.gaps_s) == 3
    assert 0 < result.ttft_s <= result.e2e_s
    assert result.tpot_s == pytest.approx((result.e2e_s - result.ttft_s) / 3)


async def test_the_body_asks_for_exactly_the_tokens(fake: tuple[FakeServer, Server]) -> None:
    await one(fake[1])
    assert fake[0].bodies == [
        {
            "model": "tiny",
            "prompt": "one two three",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_extra_body_is_filled_in_and_extensions_can_be_left_out() -> None:
    extra = {"a": "$MAX_TOKENS", "b": {"c": ['{"n": $MAX_TOKENS}']}}
    body = Server("http://x", "m", extra, extensions=False).body(ITEM)
    assert (body["a"], body["b"]) == (4, {"c": ['{"n": 4}']})
    assert "ignore_eos" not in body
    assert "stream_options" not in body


async def test_without_usage_the_text_is_tokenized(fake: tuple[FakeServer, Server]) -> None:
    fake[0].script = lambda body: [token("three words in"), token(" one event"), DONE, "[DONE]"]
    assert (await one(fake[1])).output_tokens == 5


async def test_tokens_without_text_still_have_times(fake: tuple[FakeServer, Server]) -> None:
    fake[0].script = lambda body: [token(""), token(""), DONE, "[DONE]"]
    result = await one(fake[1])
    assert result.error is None
    assert len(result.gaps_s) == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([503], "HTTP 503"),
        ([{"error": {"message": "boom"}}, "[DONE]"], "boom"),
        ([token("a"), {"error": {"message": "boom"}}], "boom"),
        (["[DONE]"], "no token"),
        ([token("a"), token("b")], "broke off"),
        (["{not json"], "JSONDecodeError"),
    ],
)
async def test_failures_are_reported(fake: tuple[FakeServer, Server], events: list[Any], message: str) -> None:
    fake[0].script = lambda body: events
    assert message in (await one(fake[1])).error


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    result = await one(Server("http://127.0.0.1:9", "m", timeout_s=5))
    assert "Connect" in result.error


async def test_closed_loop_never_exceeds_its_concurrency(fake: tuple[FakeServer, Server]) -> None:
    fake[0].hold = asyncio.Event()
    workload = Workload("w", (ITEM,) * 6, concurrency=2)
    running = asyncio.create_task(run_workload(fake[1], workload, WRITER))
    for _ in range(2):
        await fake[0].arrivals.acquire()
    fake[0].hold.set()
    run = await running
    assert fake[0].most_at_once == 2
    assert [result.error for result in run.results] == [None] * 6


async def test_open_loop_does_not_wait_for_answers(fake: tuple[FakeServer, Server]) -> None:
    fake[0].hold = asyncio.Event()
    items = tuple(WorkItem("one two three", 3, 4, at_s=0.001 * index) for index in range(5))
    running = asyncio.create_task(run_workload(fake[1], Workload("w", items, None), WRITER))
    for _ in range(5):  # all five arrive although none is answered
        await fake[0].arrivals.acquire()
    fake[0].hold.set()
    assert len((await running).results) == 5


async def test_summary_counts_wrong_lengths_mismatches_and_failures(fake: tuple[FakeServer, Server]) -> None:
    def script(body: dict[str, Any]) -> list[Any]:
        if body["prompt"] == "fails":
            return [500]
        short = {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 4}}
        return [token("a "), token("b "), DONE, short, "[DONE]"] if body["prompt"] == "short" else answer(body)

    fake[0].script = script
    items = (ITEM, WorkItem("short", 1, 4), WorkItem("fails", 1, 4))
    run = await run_workload(fake[1], Workload("w", items, 3), WRITER)
    summary = summarize(run)
    assert (summary["requests"], summary["failures"], summary["wrong_length"], summary["prompt_mismatch"]) == (
        3,
        1,
        1,
        1,
    )
    assert summary["output_tokens"] == 6
    assert summary["prompt_tokens"] == 4
    assert summary["errors"] == ['HTTP 500 {"error": {"message": "no"}}']
    assert summarize(run, extra_prompt_tokens=3)["prompt_mismatch"] == 0
    assert summary["goodput"] == pytest.approx(2 / 3, abs=1e-3)
    assert summarize(run, objective=Objective(ttft_s=0.0))["goodput"] == 0.0


def test_rates_use_the_whole_time() -> None:
    from load_tests.client import RequestResult

    results = tuple(RequestResult(ITEM, None, 0.5, 2.0, [0.5, 0.5, 0.5], 4, 3) for _ in range(3))
    summary = summarize(Run(Workload("w", (ITEM,) * 3, 3), results, 4.0, 0.1))
    assert (summary["output_tok_s"], summary["prompt_tok_s"], summary["requests_per_s"]) == (3.0, 2.25, 0.75)
    assert summary["ttft_ms"] == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert summary["tpot_ms"]["p50"] == 500.0


def test_percentiles_and_medians() -> None:
    assert percentile([], 50) is None
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 10.0], 90) == 9.0
    runs = [{"a": value, "b": {"p50": 10 * value}, "name": "x", "none": None} for value in (3, 1, 2)]
    assert median_of(runs) == {"a": 2.0, "b": {"p50": 20.0}, "name": "x", "none": None}


async def test_warm_up_says_what_is_wrong(fake: tuple[FakeServer, Server]) -> None:
    await warm_up(fake[1], WRITER, at_once=3)
    assert len(fake[0].bodies) == 4
    fake[0].script = lambda body: [400]
    with pytest.raises(RuntimeError, match="HTTP 400"):
        await warm_up(fake[1], WRITER)


async def test_repeats_send_different_texts_and_report_the_median(fake: tuple[FakeServer, Server]) -> None:
    assert await find_model(fake[1].base_url) == "tiny"

    def build(repeat: int) -> Workload:
        return Workload("w", (WorkItem(f"text {repeat}", 2, 3),), 1)

    report = await asyncio.to_thread(run_repeats, fake[1], WRITER, build, repeats=3)
    assert len(report["runs"]) == 3
    assert report["median"]["output_tokens"] == 3
    assert {body["prompt"] for body in fake[0].bodies} == {"text 0", "text 1", "text 2"}


def test_the_command_says_in_one_line_that_no_server_is_there() -> None:
    command = [sys.executable, "-m", "load_tests.bench", "--base-url", "http://127.0.0.1:9", "--workload", "single"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 1
    assert "127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr
