"""The load generator against a small real HTTP server whose every event the test decides."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from serve_app.workloads.client import RequestResult, Run, Server, open_session, run_workload, send
from serve_app.workloads.figures import Objective, median_of, percentile, summarize
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.runs import find_model, run_repeats, warm_up
from tests.workloads.fake_server import DONE, ITEM, WRITER, FakeServer, answer, serving, token


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, Server]]:
    async with serving() as both:
        yield both


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
        ([token("a"), token("b")], "ended early"),
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


async def test_who_takes_turns_waits_for_the_own_answer_only(fake: tuple[FakeServer, Server]) -> None:
    slow, quick = WorkItem("slow", 1, 500), WorkItem("quick", 1, 1)
    workload = Workload("turns", (slow, quick, slow, quick, slow, quick), 2, in_turns=True)
    run = await run_workload(fake[1], workload, WRITER)
    for user in (run.results[::2], run.results[1::2]):
        for earlier, later in pairwise(user):
            assert later.due_s >= earlier.due_s + earlier.e2e_s


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
    assert await find_model(fake[1]) == "tiny"

    def build(repeat: int) -> Workload:
        return Workload("w", (WorkItem(f"text {repeat}", 2, 3),), 1)

    report = await asyncio.to_thread(run_repeats, fake[1], WRITER, build, repeats=3)
    assert len(report["runs"]) == 3
    assert report["median"]["output_tokens"] == 3
    assert {body["prompt"] for body in fake[0].bodies} == {"text 0", "text 1", "text 2"}


async def test_latencies_count_from_when_a_request_was_due(fake: tuple[FakeServer, Server]) -> None:
    async with open_session(fake[1]) as session:
        result = await send(session, fake[1], ITEM, WRITER.count, clock_start=time.perf_counter() - 5.0)
    assert 5.0 <= result.late_s <= result.ttft_s


async def test_a_refused_request_comes_back_when_told_and_has_waited_all_along(
    fake: tuple[FakeServer, Server],
) -> None:
    fake[0].headers = {"Retry-After": "1"}
    fake[0].script = lambda body: [429] if len(fake[0].bodies) == 1 else answer(body)
    items = (WorkItem("one two three", 3, 4),)
    (result,) = (await run_workload(fake[1], Workload("w", items, None), WRITER, retries=1)).results
    assert (result.error, result.status, result.attempts, result.output_tokens) == (None, 200, 2, 4)
    assert result.ttft_s > result.late_s + 1.0


@pytest.mark.parametrize(("retries", "headers"), [(0, {"Retry-After": "1"}), (3, {}), (3, {"Retry-After": "soon"})])
async def test_without_retries_or_a_time_a_refusal_is_final(
    fake: tuple[FakeServer, Server], retries: int, headers: dict[str, str]
) -> None:
    fake[0].headers, fake[0].script = headers, lambda body: [429]
    run = await run_workload(fake[1], Workload("w", (ITEM,), None), WRITER, retries=retries)
    assert len(fake[0].bodies) == 1
    assert (summarize(run)["refused"], summarize(run)["failures"]) == (1, 1)


def test_hanging_up_is_no_failure_and_has_no_wrong_length() -> None:
    left = RequestResult(ITEM, None, 0.5, 0.7, [0.2], 2, 3, cancelled=True)
    whole = RequestResult(ITEM, None, 0.5, 2.0, [0.5, 0.5, 0.5], 4, 3)
    summary = summarize(Run(Workload("w", (ITEM, ITEM), None), (left, whole), 4.0, 0.1))
    assert (summary["failures"], summary["cancelled"], summary["wrong_length"]) == (0, 1, 0)
    assert summary["e2e_ms"]["p50"] == 2000.0
    assert summary["ttft_ms"]["p50"] == 500.0


@pytest.mark.parametrize(
    ("result", "met"),
    [
        (RequestResult(ITEM, None, 0.9, 1.2, [0.1] * 3, 4), True),
        (RequestResult(ITEM, None, 1.1, 1.4, [0.1] * 3, 4), False),
        (RequestResult(ITEM, None, 0.9, 2.1, [0.4] * 3, 4), False),
        (RequestResult(ITEM, "HTTP 429", None, 0.1, [], 0), False),
        (RequestResult(ITEM, None, 0.9, 0.9, [], 1), True),
        (RequestResult(ITEM, None, None, 0.9, [], 0, cancelled=True), False),
    ],
)
def test_the_objective_wants_both_latencies_and_an_answer(result: RequestResult, met: bool) -> None:
    assert Objective(ttft_s=1.0, tpot_s=0.2).met_by(result) is met
