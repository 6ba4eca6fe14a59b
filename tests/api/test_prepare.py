"""Text work that takes long leaves the event loop."""

import asyncio
import threading
import traceback
from typing import Any

import orjson
import pytest

from serve_app.api import app, prepare
from serve_app.api.bodies.schemas import ChatBody, parse_body
from serve_app.api.wires import completions, embeddings
from serve_app.errors import InvalidRequestError
from tests.api.conftest import Api
from tests.text.formats import tokenizer_of


async def test_many_empty_messages_are_rendered_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text at all, but a template takes its time for each."""
    tokenizer = api.service.tokenizer
    render, on_the_loop = tokenizer.apply_chat_template, []

    def watched(*given: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return render(*given)

    monkeypatch.setattr(tokenizer, "apply_chat_template", watched)
    for count in (1, 200):
        messages = [{"role": "user", "content": ""}] * count
        assert (await api.http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    assert on_the_loop == [True, False]


async def test_large_bodies_are_parsed_beside_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in them, and one at a time: a hundred of them at once stop nobody's stream."""
    on_the_loop = []

    def watched(*given: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return parse_body(*given)

    monkeypatch.setattr(completions, "parse_body", watched)
    for count in (1, 200_000):
        answer = await api.http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [7] * count})
        assert answer.status_code == (200 if count == 1 else 400)
    assert on_the_loop == [True, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_so_are_those_that_ask_for_tokens(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    on_the_loop = []

    def watched(*given: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return parse_body(*given)

    monkeypatch.setattr(app, "parse_body", watched)
    for fields in ({}, {"unknown": [7] * 200_000}):
        assert (await api.http.post(path, json={**body, **fields})).status_code == (400 if fields else 200)
    assert on_the_loop == [True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_long_prompts_are_written_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Those of 8,000 tokens with their alternatives take some tenths of a second."""
    write, on_the_loop = completions._Echo.logprobs, []

    def watched(*given: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return write(*given)

    monkeypatch.setattr(completions._Echo, "logprobs", watched)
    for count in (2, 1200):
        asked = {"prompt": [5] * count, "echo": True, "logprobs": 0, "max_tokens": 1, "stream": stream}
        assert (await api.http.post("/v1/completions", json=asked)).status_code == 200
    assert on_the_loop == [True, False]


@pytest.mark.parametrize(
    ("path", "field", "owner", "name"),
    [
        ("/v1/completions", "prompt", completions, "engine_request"),
        ("/v1/embeddings", "input", embeddings.EmbeddingsJob, "_request"),
    ],
)
async def test_many_ids_are_checked_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, field: str, owner: Any, name: str
) -> None:
    check, on_the_loop = getattr(owner, name), []

    def watched(*given: Any, **more: Any) -> Any:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return check(*given, **more)

    monkeypatch.setattr(owner, name, watched)
    for count in (1, 5):
        await api.http.post(path, json={field: [[5] * 1900] * count})
    assert on_the_loop == [True] + [False] * 5


async def test_a_text_far_too_long_is_refused_after_its_first_part(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its bytes alone do not tell: a vocabulary may have a token for many of them."""
    tokenizer = api.service.tokenizer
    encode, lengths = tokenizer.encode, []

    def watched(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", watched)
    monkeypatch.setattr(tokenizer, "min_tokens", lambda text: 0)
    long = "q" * 640_000
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/tokenize", {"prompt": long}),
    ):
        answer = await api.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert sum(lengths) <= 3 * 65_536


async def test_a_long_text_of_few_tokens_is_served(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " " * 30_000
    assert len(api.service.tokenizer.encode(text)) < 2000
    assert (await api.http.post("/v1/completions", json={"prompt": text})).status_code == 200


async def test_letters_that_json_could_escape_count_as_they_are(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.service, "tokenizer", tokenizer_of("qwen3"))
    text = ("\u00e9" + " " * 16) * 900
    assert len(api.service.tokenizer.encode(text)) < 1900
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": orjson.dumps({"a": text}).decode()}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    answer = await api.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("odd", ["9" * 5000, r'"\ud800"', "[" * 500 + "]" * 500])
async def test_a_tool_that_no_template_can_write_is_no_error_of_the_server(
    api: Api, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(api.service, "tokenizer", tokenizer_of("qwen3"))
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"default": {odd}}}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    answer = await api.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code in (200, 400), answer.text


async def test_more_ids_than_the_context_holds_are_not_decoded(api: Api) -> None:
    answer = await api.http.post("/detokenize", json={"tokens": [5] * 100_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert "2048" in answer.json()["error"]["message"]


async def test_parts_are_bounded_over_all_messages(api: Api) -> None:
    parts = [{"type": "text", "text": "a"}] * 1000
    answer = await api.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}] * 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "4096 parts" in answer.json()["error"]["message"]


async def test_only_so_many_long_texts_wait(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = api.service.tokenizer
    encode, go = tokenizer.encode, threading.Event()

    def held(text: str, **options: Any) -> Any:
        go.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", held)
    body = {"prompt": "a b " * 2_500}
    texts = [asyncio.create_task(api.http.post("/tokenize", json=body)) for _ in range(140)]
    await asyncio.wait(texts, return_when=asyncio.FIRST_COMPLETED)
    go.set()
    answers = await asyncio.gather(*texts)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) <= 12
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in refused} == {(429, "1")}


async def test_between_two_large_bodies_the_interpreter_is_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as the one before took, but for 0.1 s at most."""
    clock = FakeTime()
    monkeypatch.setattr(prepare, "time", clock)
    monkeypatch.setattr(prepare._Parsing, "begins_at", 0.0)
    begun = []

    def parse(raw: bytes) -> None:
        begun.append(round(clock.now, 3))
        clock.now += len(raw) / 10_000_000

    for size in (400_000, 300_000, 4_000_000, 200_000):
        await prepare.parsed(parse, b" " * size)
    assert begun == [0.0, 0.08, 0.14, 0.64]


class FakeTime:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    "body", [{"messages": [{"role": "user"}] * 9000}, {"messages": "x" * 9000}], ids=["list", "text"]
)
def test_an_error_holds_nothing_of_what_was_parsed(body: dict[str, Any]) -> None:
    """Many wait for the event loop at times; 4 MiB of JSON may be 40 MiB of objects."""
    raw = orjson.dumps(body)
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, raw)
    assert caught.value.__context__ is None
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    held = [value for frame in frames[1:] for value in frame.f_locals.values()]
    assert raw in held
    assert not [value for value in held if isinstance(value, dict | list | ChatBody)]
