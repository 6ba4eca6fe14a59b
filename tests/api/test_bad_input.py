"""Requests that are wrong. Each is answered with an OpenAI-shaped error naming the field, and the
next one works."""

import json
from typing import Any

import pytest

from serve_app.api.bodies.body import MAX_CONTAINERS
from tests.api.conftest import Api

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


async def refused(api: Api, path: str, status: int, body: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Send, check the error's form, and check that the server still serves and holds nothing."""
    if body is not None:
        kwargs["content"] = body if isinstance(body, bytes) else json.dumps(body)
        kwargs.setdefault("headers", {"content-type": "application/json"})
    answer = await api.http.post(path, **kwargs)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert len(answer.content) < 1000
    assert not any(word in answer.text for word in ("Traceback", ".py", "/work", "pydantic"))
    assert (api.service.running, api.admission.ongoing, api.admission.queued) == (0, 0, 0)
    assert (await api.http.post(TEXT, json={"prompt": "x"})).status_code == 200
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "secret',
        b"not json secret",
        b"[1]",
        b'"text"',
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "unused": -Infinity}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:30],
)
async def test_bodies_that_are_no_json_object(api: Api, body: bytes) -> None:
    error = await refused(api, TEXT, 400, body)
    assert error["code"] == "invalid_json"
    assert "secret" not in error["message"]


@pytest.mark.parametrize("broken", [False, True])
async def test_a_body_has_only_so_many_objects_and_arrays(api: Api, broken: bool) -> None:
    """Those in texts do not count, nor does the way they are written confuse it."""
    text = r"[{\\[{" + r"\"[{\"" * 9000
    for count, code in ((MAX_CONTAINERS - 3, "invalid_json" if broken else None), (MAX_CONTAINERS - 2, "invalid_json")):
        empty = ", ".join(["{}"] * count)
        raw = f'{{"messages": [{{"role": "user", "content": "{text}"}}, {empty}{"" if broken else "]}"}'.encode()
        error = await refused(api, CHAT, 400, raw)
        assert error["code"] == code
        assert ("objects and arrays" in error["message"]) == (count == MAX_CONTAINERS - 2)


async def test_the_position_of_a_json_error_is_named(api: Api) -> None:
    error = await refused(api, TEXT, 400, b'{\n"prompt": oops}')
    assert "line 2 column 11" in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed"])
async def test_numbers_too_large_for_json(api: Api, field: str) -> None:
    error = await refused(api, TEXT, 400, b'{"prompt": "x", "%b": 1e400}' % field.encode())
    assert error["param"] == field


OVER = 2**63
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo"),
    ({"x" * 10_000: 1}, "x" * 64),
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 16.5}, "max_tokens"),
    ({"length_penalty": 1.5}, "length_penalty"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"max_tokens": OVER}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 10**10}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"seed": OVER}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 100_000}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"1": 1, "x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["a"] * 200}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["x" * 300]}, "bad_words[0]"),
    ({"bad_words": ["\U0001f4a9" * 80]}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(300))}, "stop_token_ids"),
    ({"user": "x" * 100_000}, "user"),
    ({"suffix": "end"}, "suffix"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [OVER]}, "prompt"),
    ({"prompt": ["x"] * 20_000}, "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
    ({"prompt": [[5]] * 7}, "prompt"),  # more than the queue holds at all
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": "word " * 3000}, "prompt"),
    ({"prompt": "word " * 150_000}, "prompt"),
    ({"prompt": [5] * 2047, "max_tokens": 2}, "max_tokens"),
]


@pytest.mark.parametrize(("given", "param"), PARAMETERS, ids=lambda value: str(value)[:50])
async def test_parameters(api: Api, given: dict[str, Any], param: str) -> None:
    error = await refused(api, TEXT, 400, {"prompt": "x", **given})
    assert error["param"] == param
    assert f"`{param}`" in error["message"]


async def test_what_is_over_the_context_says_so(api: Api) -> None:
    for body in ({"prompt": [5] * 2048}, {"prompt": [5] * 2000, "max_tokens": 49}):
        error = await refused(api, TEXT, 400, body)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    fits = {"prompt": [5] * 2047, "max_tokens": 1}
    assert (await api.http.post(TEXT, json=fits)).status_code == 200


async def test_echoed_logprobs_are_bounded(api: Api) -> None:
    api.service.max_model_len = 8192
    for wide in ({"logprobs": 20}, {"logprobs": 1, "n": 20}):
        error = await refused(api, TEXT, 400, {"prompt": [5] * 4000, "echo": True, **wide})
        assert error["param"] == "logprobs"
    error = await refused(api, TEXT, 400, {"prompt": [5] * 4000, "prompt_logprobs": 20})
    assert error["param"] == "prompt_logprobs"
    error = await refused(api, CHAT, 400, {"messages": [{**USER, "content": "a " * 4000}], "prompt_logprobs": 20})
    assert error["param"] == "prompt_logprobs"


CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [USER] * 5000}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "<|im_end|>", "content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": f"wizard{i}", "content": "Hi"} for i in range(5)]}, "messages"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True, "messages": [
        USER, {"role": "assistant", "content": "Yes"}]}, "continue_final_message"),
    ({"continue_final_message": True, "messages": [USER, {"role": "assistant"}]}, "continue_final_message"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 3}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{**USER, "reasoning_content": "Hm."}]}, "messages[0].reasoning_content"),
    ({"messages": [{**USER, "content": 3}]}, "messages[0].content"),
    ({"messages": [{**USER, "content": None}]}, "messages[0].content"),
    ({"messages": [{**USER, "content": [3]}]}, "messages[0].content"),
    ({"messages": [{**USER, "content": [[USER]]}]}, "messages[0].content"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "a"}] * 5000}]}, "messages"),
    ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1"}}]}]},
     "messages[0].content"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{**USER, "tool_calls": [CALLED]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "extra": 1}]}, "messages[0].extra"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 4096}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "function": {"name": "no blanks"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "tools"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}},
     "tool_choice.allowed_tools.tools"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"messages": [{**USER, "refusal": "No."}]}, "messages[0].refusal"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "a", "lang": "en"}]}]}, "messages[0].content"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"messages": [{**USER, "content": "word " * 3000}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "param"), CHATS, ids=lambda value: str(value)[:50])
async def test_chats(api: Api, given: dict[str, Any], param: str) -> None:
    error = await refused(api, CHAT, 400, {"messages": [USER], **given})
    assert error["param"] == param
    assert f"`{param}`" in error["message"]


@pytest.mark.parametrize("name", ["gpt-9", "../../etc/passwd", "", "x" * 5000])
async def test_an_unknown_model(api: Api, name: str) -> None:
    error = await refused(api, TEXT, 404, {"prompt": "x", "model": name})
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "/v1/models" in error["message"]


async def test_tokenize_and_detokenize(api: Api) -> None:
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"] * 10_000}, "tokens[0]"),
    ]:  # fmt: skip
        assert (await refused(api, path, 400, body))["param"] == param
    assert (await api.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await api.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_routes_and_methods(api: Api) -> None:
    for method, path, status, code in [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("OPTIONS", TEXT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/docs", 404, "not_found"),
    ]:
        answer = await api.http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["request_id"]) == (
            status, code, answer.headers["x-request-id"],
        )  # fmt: skip
        assert ("allow" in answer.headers) == (status == 405)
    assert (await api.http.request("OPTIONS", "/health/live")).headers["allow"] == "GET, HEAD"
    assert (await api.http.head(CHAT)).status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
async def test_media_types(api: Api, headers: dict[str, str]) -> None:
    error = await refused(api, TEXT, 415, b'{"prompt": "x"}', headers=headers)
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"])
async def test_json_by_any_of_its_names(api: Api, kind: str) -> None:
    answer = await api.http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert answer.status_code == 200
