"""A whole server under load, on Ray's fast path and on its default path: the same behaviour is
required of both."""

import asyncio
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from tests.serving.conftest import QUEUED, SLOTS, WAITING, Server, wait_for

pytestmark = pytest.mark.cluster

MAX_REQUESTS = SLOTS + WAITING + QUEUED
NO_EOS: dict[str, Any] = {"ignore_eos": True}
IDLE = {
    "serve_app_requests_running": 0.0,
    "serve_app_requests_waiting": 0.0,
    "serve_app_waiting_served_ratio": 0.0,
    "serve_app_kv_blocks_used": 0.0,
    "serve_app_ingress_queue_depth": 0.0,
    "serve_app_ingress_requests_ongoing": 0.0,
    "serve_app_requests_active": 0.0,
}


def wait_idle(server: Server) -> None:
    def idle() -> bool:
        metrics = server.metrics()
        return {name: metrics[name] for name in IDLE} == IDLE

    wait_for(idle, "nothing waits, runs or holds blocks")


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **NO_EOS, **fields}


async def complete(client: openai.AsyncOpenAI, prompt: str, max_tokens: int) -> tuple[str, int]:
    """A streamed completion: its text and the output tokens that its usage counts."""
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=NO_EOS,
    )
    text, tokens = "", 0
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return text, tokens


async def test_chat_and_completions_answer(server: Server) -> None:
    async with server.client() as client:
        plain = await client.completions.create(
            model="tiny", prompt="Once upon a time", max_tokens=8, temperature=0, extra_body=NO_EOS
        )
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 8
        assert await complete(client, "Once upon a time", 8) == (plain.choices[0].text, 8)
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]


def test_embeddings_through_openais_client(server: Server) -> None:
    """Which asks for base64 by itself. Strictly it reads floats only, as its types do not know what
    it asks for."""
    asked: dict[str, Any] = {"model": "tiny", "input": ["Once", "Twice", "Once"], "dimensions": 8}
    how: dict[str, Any] = {"api_key": "none", "base_url": f"{server.url}/v1", "max_retries": 0}
    with openai.OpenAI(**how) as client, openai.OpenAI(**how, _strict_response_validation=True) as strict:
        first, second, again = (entry.embedding for entry in client.embeddings.create(**asked).data)
        assert len(first) == 8
        assert first == again != second
        assert math.hypot(*first) == pytest.approx(1, abs=1e-5)
        floats = strict.embeddings.create(**asked, encoding_format="float")
        assert floats.data[1].embedding == pytest.approx(second, abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="`dimensions` must be at most 64"):
            client.embeddings.create(model="tiny", input="Once", dimensions=65)


async def test_a_constraint_holds_on_the_replica(server: Server) -> None:
    async with server.client() as client:
        answer = await client.completions.create(
            model="tiny",
            prompt=["Once", "Twice"],
            n=3,
            max_tokens=20,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
    assert len(answer.choices) == 6
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}


def test_ready_and_live(server: Server) -> None:
    assert [httpx.get(f"{server.url}/health/{which}").status_code for which in ("ready", "live")] == [200, 200]


def test_it_says_so_only_where_it_is_not_on_the_fast_path(server: Server) -> None:
    def told() -> list[str]:
        return [line for line in server.lines if "Ingress: WARNING: this server runs on Ray's default path" in line]

    behind_haproxy = bool(server.running("haproxy"))
    if not behind_haproxy:
        wait_for(lambda: bool(told()), "the line is there")
    assert len(told()) == (0 if behind_haproxy else 1)


async def test_64_streams_at_once_say_what_each_says_alone(server: Server) -> None:
    prompts = [f"Story number {i % 16}: {'long ' * (i % 7)}" for i in range(64)]
    async with server.client() as client:
        alone = {prompt: await complete(client, prompt, 24) for prompt in sorted(set(prompts))}
        together = await asyncio.gather(*(complete(client, prompt, 24) for prompt in prompts))
    assert together == [alone[prompt] for prompt in prompts]
    wait_idle(server)


async def test_clients_that_vanish_leave_nothing_behind(server: Server) -> None:
    """Running and waiting ones: more clients leave than the engine has slots and queue entries."""
    before = server.metrics()
    long = body(max_tokens=4000, temperature=1)  # what is drawn repeats nothing to be drafted

    async def vanish(http: httpx.AsyncClient, after_chunks: int) -> None:
        async with http.stream("POST", f"{server.url}/v1/completions", json={**long, "stream": True}) as response:
            assert response.status_code == 200
            chunks = response.aiter_bytes()
            for _ in range(after_chunks):
                await anext(chunks)

    def all_there() -> bool:
        return server.metrics()["serve_app_requests_active"] == 24.0

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as http:
        await asyncio.gather(*(vanish(http, after_chunks=1 + i % 3) for i in range(24)))
        posts = [asyncio.create_task(http.post(f"{server.url}/v1/completions", json=long)) for _ in range(24)]
        await asyncio.to_thread(wait_for, all_there, "24 requests are at the ingress")
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
    wait_idle(server)
    after = server.metrics()
    cancelled = 'serve_app_requests_total{outcome="cancelled"}'
    assert after[cancelled] - before.get(cancelled, 0.0) == 48
    sampled = after["serve_app_sampled_tokens_total"] - before["serve_app_sampled_tokens_total"]
    assert sampled < 48 * 4000 / 2, "abandoned requests ran on"


async def test_a_burst_of_short_requests_is_answered(server: Server) -> None:
    """Their calls end while the ingress is still busy making others."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120) as http:
        url = f"{server.url}/v1/completions"
        answers = await asyncio.gather(*(http.post(url, json=body(max_tokens=1)) for _ in range(MAX_REQUESTS)))
    assert [answer.text for answer in answers if answer.status_code != 200] == []


async def test_beyond_its_queue_the_server_refuses_with_retry_after(server: Server) -> None:
    def all_there() -> bool:
        return server.metrics()["serve_app_requests_active"] == MAX_REQUESTS

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120) as http:
        url = f"{server.url}/v1/completions"
        # Every slot is taken for longer than the others need: sampled text has no repetitions to
        # draft.
        asks = (body(max_tokens=4000, temperature=1, seed=number) for number in range(MAX_REQUESTS))
        long = [asyncio.create_task(http.post(url, json=ask)) for ask in asks]
        try:
            await asyncio.to_thread(wait_for, all_there, "every slot is taken")
            answers = await asyncio.gather(*(http.post(url, json=body(max_tokens=1)) for _ in range(20)))
            assert not any(post.done() for post in long)
        finally:
            for post in long:
                post.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            wait_idle(server)
    for answer in answers:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_counters_equal_what_the_client_counted(server: Server) -> None:
    wait_idle(server)
    before = server.metrics()
    async with server.client() as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="tiny", prompt="x" * (40 + i), max_tokens=5 + i, n=1 + i % 2, extra_body=NO_EOS
                )
                for i in range(12)
            )
        )
    wait_idle(server)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    usages = [answer.usage for answer in answers if answer.usage is not None]
    output_tokens = sum(usage.completion_tokens for usage in usages)
    assert grown("serve_app_prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("serve_app_output_tokens_total") == output_tokens
    assert grown("serve_app_sampled_tokens_total") == output_tokens
    assert grown('serve_app_requests_total{outcome="completed"}') == 12
    assert grown('serve_app_time_to_first_token_seconds_count{where="ingress"}') == 12
    assert grown('serve_app_time_to_first_token_seconds_count{where="engine"}') == 12
    assert grown("serve_app_inter_token_latency_seconds_count") == output_tokens - sum(1 + i % 2 for i in range(12))
    computed = grown('serve_app_computed_tokens_total{phase="prefill"}')
    computed += grown('serve_app_computed_tokens_total{phase="decode"}')
    assert grown("serve_app_batch_tokens_sum") == computed
    assert grown("serve_app_step_seconds_count") == grown("serve_app_batch_tokens_count") > 0
    assert grown("serve_app_engine_busy_seconds_total") == pytest.approx(grown("serve_app_step_seconds_sum"))
    assert 0 < after["serve_app_engine_busy_ratio"] <= 1
    assert after["serve_app_scrape_up"] == 1
    assert not [name for name in after if name.startswith("serve_app_gpu")]


def test_prefix_hits_are_counted(server: Server) -> None:
    prompt = "The same long beginning, asked twice in a row. " * 3
    name = "serve_app_prefix_cache_hit_tokens_total"
    httpx.post(f"{server.url}/v1/completions", json=body(prompt=prompt))
    before = server.metrics()[name]
    answer = httpx.post(f"{server.url}/v1/completions", json=body(prompt=prompt)).json()
    hits = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert server.metrics()[name] - before == hits > 100


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"no_such_field": 1}, 400, "no_such_field"),
        ({"prompt": "x" * 5000}, 400, "context"),
        ({"prompt": [5, 999_999]}, 400, "prompt"),
        ({"model": "another"}, 404, "another"),
        ({"prompt": "x" * 2**20}, 413, "bytes"),
    ],
)
def test_bad_input_is_refused_in_openais_shape(server: Server, fields: dict[str, Any], status: int, word: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(**fields))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert re.fullmatch(r"[\w.:-]+", answer.headers["x-request-id"])


def test_a_request_id_comes_back_once(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine-17"})
    assert answer.headers.get_list("x-request-id") == ["mine-17"]


def test_headers_that_are_too_large_are_refused_in_openais_shape(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(), headers={"x-filler": "x" * 15_000})
    assert answer.status_code == 200
    answer = httpx.post(f"{server.url}/v1/completions", json=body(), headers={"x-filler": "x" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


def haproxy_configurations(server: Server) -> Iterator[list[str]]:
    """The lines of each HAProxy's, as its process has it; none on Ray's default path."""
    for process in server.running("haproxy"):
        command = process.cmdline()
        text = Path(command[command.index("-f") + 1]).read_text()
        yield [line.strip() for line in text.splitlines()]


def test_haproxy_does_not_wait_for_headers_for_long(server: Server) -> None:
    """Its configuration says so; a test that waits would take as long as it does."""
    for lines in haproxy_configurations(server):
        sections = [i for i, line in enumerate(lines) if line.startswith(("frontend ", "backend ", "listen "))]
        start = lines.index("frontend http_frontend")
        end = next((i for i in sections if i > start), len(lines))
        assert "timeout http-request 10s" in lines[start:end]


def test_garbage_is_refused(server: Server) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"\xff\xfe", b'{"model": NaN}'):
        answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, content
    assert httpx.get(f"{server.url}/no/such/path").status_code == 404


def test_everything_listens_on_loopback_only(server: Server) -> None:
    listening = [
        (process.name(), connection.laddr)
        for process in server.descendants()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5
    assert [entry for entry in listening if entry[1].ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []


def test_ray_runs_no_dashboard(server: Server) -> None:
    """Its process would start for Ray's usage statistics alone, and every start of ours wait for
    it."""
    assert server.running("raylet")
    assert server.running("dashboard.py") == []


def test_debug_replicas_says_who_is_there(server: Server) -> None:
    [engine] = server.running("EngineReplica")
    [replica] = httpx.get(f"{server.url}/debug/replicas").json()
    assert (replica["pid"], replica["condition"], replica["leaving"]) == (engine.pid, "ok", False)
    wait_for(
        lambda: httpx.get(f"{server.url}/debug/replicas").json()[0]["load"]["free_blocks"] > 0, "a heartbeat was heard"
    )


async def test_other_apis_say_what_chat_says(server: Server) -> None:
    fields: dict[str, Any] = {"seed": 5, **NO_EOS}
    async with server.client() as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=30, extra_body=fields
        )
        events = client.responses.stream(model="tiny", input="Hello", max_output_tokens=30, extra_body=fields)
        async with events as stream:
            told = [event async for event in stream]
    assert told[-1].type == "response.incomplete"
    assert told[-1].response.output_text == chat.choices[0].message.content
    with anthropic.Anthropic(
        api_key="none", base_url=server.url, max_retries=0, _strict_response_validation=True
    ) as other:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        with other.messages.stream(max_tokens=30, **asked, extra_body=fields) as messages:
            assert messages.get_final_text() == chat.choices[0].message.content
            assert messages.get_final_message().stop_reason == "max_tokens"
        counted = other.messages.count_tokens(**asked).input_tokens
        assert chat.usage is not None
        assert counted == chat.usage.prompt_tokens
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            other.messages.create(**{**asked, "model": "other"}, max_tokens=3)


def streamed(server: Server, path: str, request: dict[str, Any], started: Callable[[], object]) -> list[Any]:
    """The data of a stream's events; `started` is called after the third."""
    events: list[Any] = []
    with httpx.stream("POST", f"{server.url}/v1/{path}", json={**request, "stream": True}, timeout=150) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 3:
                    started()
    return events


def completion_of(events: list[Any]) -> Any:
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), logprobs, choices[-1]["finish_reason"]


def response_of(events: list[Any]) -> Any:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    return text, events[-1]["type"], events[-1]["response"]["usage"]["output_tokens"]


def message_of(events: list[Any]) -> Any:
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return text, [(event["type"], event.get("delta")) for event in events[-3:]], events[-2]["usage"]["output_tokens"]


def test_streams_and_embeddings_outlive_their_only_replica(server: Server) -> None:
    """Last in the file: the replica that the other tests measured is gone afterwards."""
    ask = {"temperature": 0, **NO_EOS}
    wires: list[tuple[str, dict[str, Any], Callable[[list[Any]], Any]]] = [
        ("completions", body(max_tokens=4000, logprobs=1), completion_of),
        ("responses", {"input": "Hello", "max_output_tokens": 3000, **ask}, response_of),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, **ask}, message_of),
    ]

    texts = {"input": [f"{i} " + "many words " * 30 for i in range(150)], "pooling": "mean"}
    most = (SLOTS + WAITING) // 2  # of the texts at once

    def answers(strike: Callable[[], object]) -> list[Any]:
        """All at once; `strike` is called when each has begun."""
        embeddings: list[Future[httpx.Response]] = []

        def under_way() -> bool:
            """Beside the streams; not always `most` of them, since each makes room for the next
            one.

            They are asked for again when they have ended before anybody saw them run.
            """
            ended = [run.result().raise_for_status() for run in embeddings if run.done()]
            if len(ended) == len(embeddings):
                embeddings.append(pool.submit(httpx.post, f"{server.url}/v1/embeddings", json=texts, timeout=150))
            return server.metrics()["serve_app_ingress_requests_ongoing"] > len(wires)

        def go_on() -> None:
            wait_for(under_way, "embeddings are under way")
            strike()

        begun = threading.Barrier(len(wires), go_on)
        with ThreadPoolExecutor(max_workers=len(wires) + 1) as pool:
            running = [pool.submit(streamed, server, path, request, begun.wait) for path, request, _ in wires]
            told = [read(run.result()) for run, (_, _, read) in zip(running, wires, strict=True)]
            return [*told, embeddings[-1].result().raise_for_status().json()]

    undisturbed = answers(lambda: None)
    before = server.metrics().get("serve_app_failovers_total", 0.0)
    [engine] = server.running("EngineReplica")
    assert answers(engine.kill) == undisturbed
    failovers = server.metrics()["serve_app_failovers_total"] - before
    assert len(wires) < failovers <= len(wires) + most
    wait_idle(server)
