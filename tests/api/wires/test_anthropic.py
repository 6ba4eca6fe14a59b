"""POST /v1/messages, read by the `anthropic` client, which checks every event and object against
its types."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.api.request_events import Outcome
from serve_app.errors import EngineError, OverloadedError, UnavailableError
from serve_app.tenants.keys import KeyRing
from tests.api.conftest import Api, Recorder, prompt, script
from tests.api.limits import make_limits
from tests.api.sdks import anthropic_of, strict_anthropic
from tests.api.services import ScriptedService
from tests.api.weather import CALL, CHAT_TOOLS, MESSAGES, PARAMETERS, THOUGHT
from tests.text.formats import tokenizer_of

WEATHER: dict[str, Any] = {"name": "weather", "description": "Tells it", "input_schema": PARAMETERS}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: list[Any] = [WEATHER, {"name": "stop", "input_schema": NOTHING}]


@pytest.fixture
async def client(scripted: Api) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_of(scripted.app) as client:
        yield client


def plain(message: Message) -> list[tuple[Any, ...]]:
    """The content without names of its own."""
    told: list[tuple[Any, ...]] = []
    for block in message.content:
        match block.type:
            case "text":
                told.append(("text", block.text))
            case "thinking":
                told.append(("thinking", block.thinking))
            case "tool_use":
                assert block.id.startswith("toolu_")
                told.append(("call", block.name, block.input))
    return [*told, (message.stop_reason, message.stop_sequence)]


async def gather(client: anthropic.AsyncAnthropic, body: dict[str, Any]) -> Message:
    """What the client's own stream adds up to."""
    async with client.messages.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_message()


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 200, "messages": MESSAGES, **fields}


async def test_a_text(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(**body_of())
    assert answer.id.startswith("msg_")
    assert answer._request_id is not None
    assert plain(answer) == [("text", "Paris is the capital of France."), ("end_turn", None)]
    usage = answer.usage
    asked = len(scripted.service.requests[0].prompt_token_ids)
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == asked
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (1, 8)
    streamed = await gather(client, body_of())
    assert plain(streamed) == plain(answer)
    assert streamed.usage.model_dump(exclude_none=True) == usage.model_dump(exclude_none=True)
    assert [end[:2] for end in scripted.observer.ended] == [("messages", Outcome.COMPLETED)] * 2
    counted = await client.messages.count_tokens(model="scripted", messages=MESSAGES)
    assert counted.input_tokens == asked


async def test_events_have_names(scripted: Api) -> None:
    answer = await scripted.http.post("/v1/messages", json=body_of(stream=True, max_tokens=2))
    *events, nothing = answer.text.split("\n\n")
    assert nothing == ""
    told = [event.split("\ndata: ") for event in events]
    names = [name.removeprefix("event: ") for name, _ in told]
    assert names == [json.loads(data)["type"] for _, data in told]
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * 2, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "family", "content"),
    [
        (f"Let me see.\n{CALL}", "hermes", ["text", "call"]),
        (f"{CALL}\n{CALL.replace('Rome', 'Oslo')}", "hermes", ["call", "call"]),
        (CALL.replace("Rome", "\\ud800").replace("3", "9" * 40), "hermes", ["call"]),
        ("No call.", "hermes", ["text"]),
        (CALL[:-20], "hermes", ["call"]),
        ("", "hermes", ["text"]),
        (f"{THOUGHT}Sunny.", "qwen3", ["thinking", "text"]),
        (f"{THOUGHT}{CALL}", "qwen3", ["thinking", "call"]),
    ],
    ids=[
        "text and call",
        "two calls",
        "odd call",
        "no call",
        "half a call",
        "nothing",
        "thinking",
        "thinking and call",
    ],
)
async def test_events_add_up_to_the_whole_and_to_chats_message(
    scripted: Api, client: anthropic.AsyncAnthropic, reply: str, family: str, content: list[str]
) -> None:
    script(scripted, reply, tokenizer_of(family))
    answer = await scripted.http.post("/v1/messages", json=body_of(tools=TOOLS))
    assert answer.status_code == 200
    whole = plain(Message.model_validate(json.loads(answer.text)))
    assert [block[0] for block in whole[:-1]] == content
    if "ud800" not in reply:  # the client itself cannot read half a character
        assert plain(await gather(client, body_of(tools=TOOLS))) == whole
    assert whole[-1][0] == ("tool_use" if "call" in content else "end_turn")
    chat = await scripted.openai.chat.completions.create(model="scripted", messages=MESSAGES, tools=CHAT_TOOLS)
    message = chat.choices[0].message
    assert "".join(block[1] for block in whole[:-1] if block[0] == "text") == (message.content or "")
    if CALL in reply:
        assert [block[1:] for block in whole if block[0] == "call"] == [
            (call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
    first, *_, last = scripted.service.requests
    assert first.prompt_token_ids == last.prompt_token_ids
    assert first.params.grammar == last.params.grammar


async def test_the_stop_sequence_that_ended_it_is_told(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    body = body_of(stop_sequences=["zzz", "capital"])
    answer = await client.messages.create(**body)
    assert plain(answer) == [("text", "Paris is the "), ("stop_sequence", "capital")]
    assert plain(await gather(client, body)) == plain(answer)


@pytest.mark.parametrize(
    ("stop", "content"),
    [
        ("\n", [("call", "weather", {"city": "Rome", "days": 3}), ("text", "Or so."), ("tool_use", None)]),
        ("_call", [("call", "weather", {"city": "Rome", "days": 3}), ("text", "Or so."), ("tool_use", None)]),
        ("Rome", [("call", "weather", {"city": "Rome", "days": 3}), ("text", "Or so."), ("tool_use", None)]),
        (" so", [("call", "weather", {"city": "Rome", "days": 3}), ("text", "Or"), ("stop_sequence", " so")]),
        ("think", [("call", "weather", {"city": "Rome", "days": 3}), ("text", "Or so."), ("tool_use", None)]),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
async def test_stop_sequences_are_looked_for_in_texts_alone(
    scripted: Api, client: anthropic.AsyncAnthropic, stop: str, content: list[Any], thinks: bool
) -> None:
    """No mark, no reasoning and no input of a call is text, whole and streamed."""
    script(scripted, f"{THOUGHT if thinks else ''}{CALL}\nOr so.", tokenizer_of("qwen3"))
    expected = [("thinking", "Rome.\nHm."), *content] if thinks else content
    body = body_of(tools=TOOLS, stop_sequences=[stop])
    assert plain(await client.messages.create(**body)) == expected
    assert plain(await gather(client, body)) == expected


async def test_an_answer_that_is_cut_says_by_what(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    """More than the context holds may be asked for: clients that know no other models ask for a
    lot."""
    for asked, room, reason in ((2, 2048, "max_tokens"), (64_000, 40, "model_context_window_exceeded")):
        script(scripted, "word " * 50)
        scripted.service.max_model_len = room
        body = body_of(max_tokens=asked)
        answer = await client.messages.create(**body, timeout=60)
        assert answer.stop_reason == reason
        assert plain(await gather(client, body)) == plain(answer)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
async def test_a_required_call_comes_and_is_chats(live: Api, choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))
    async with httpx2.AsyncClient(timeout=60) as http:
        client = strict_anthropic(http, str(live.http.base_url))
        body = body_of(
            tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True}, extra_body={"seed": 1},
            model="babbler",
        )  # fmt: skip
        answer = await client.messages.create(**body)
        assert plain(await gather(client, body)) == plain(answer)
    [(kind, name, arguments), (reason, _)] = plain(answer)
    assert (kind, name, reason) == ("call", "weather", "tool_use")
    assert arguments["city"] in ("Rome", "Oslo")
    named: Any = {"type": "function", "function": {"name": "weather"}}
    chat = await live.openai.chat.completions.create(
        model="babbler", messages=MESSAGES, tools=CHAT_TOOLS[:1], seed=1, max_tokens=200, parallel_tool_calls=False,
        tool_choice="required" if choice["type"] == "any" else named,
    )  # fmt: skip
    [call] = chat.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments) == arguments


async def test_the_history_is_chats(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    """What was answered goes back as the client keeps it, with what the tools said."""
    script(scripted, f"{THOUGHT}Let me see.\n{CALL}", tokenizer_of("qwen3"))
    first = await client.messages.create(**body_of(tools=TOOLS, system="Be brief."))
    call = first.content[-1]
    assert call.type == "tool_use"
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny.", **cached}]}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [result, {"type": "text", "text": "And"}, {"type": "text", "text": "so?", **cached}],
        },
    ]
    await client.messages.create(
        **body_of(messages=history, tools=TOOLS, system=[{"type": "text", "text": "Be brief.", **cached}])
    )
    asked = scripted.service.requests[-1].prompt_token_ids
    counted = await client.messages.count_tokens(
        model="scripted",
        messages=history,
        tools=TOOLS,
        system="Be brief.",  # type: ignore[arg-type]
    )
    assert counted.input_tokens == len(asked)
    function = {"name": "weather", "arguments": json.dumps(call.input)}
    await scripted.openai.chat.completions.create(
        model="scripted",
        tools=CHAT_TOOLS,
        messages=[
            {"role": "system", "content": "Be brief."},
            *MESSAGES,
            {  # type: ignore[list-item, misc]
                "role": "assistant", "content": "Let me see.", "reasoning_content": "Rome.\nHm.",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
            {"role": "user", "content": "And\nso?"},
        ],
    )  # fmt: skip
    assert scripted.service.requests[-1].prompt_token_ids == asked


@pytest.mark.parametrize(
    ("thinking", "closed"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, False),
        ({"thinking": {"type": "adaptive"}}, False),
    ],
)
async def test_thinking_is_switched_by_the_request(
    scripted: Api, client: anthropic.AsyncAnthropic, thinking: dict[str, Any], closed: bool
) -> None:
    script(scripted, "Sunny.", tokenizer_of("qwen3"))
    await client.messages.create(**body_of(**thinking))
    assert prompt(scripted).endswith("</think>\n\n") is closed
    script(scripted, "Sunny.", tokenizer_of("hermes"))  # which knows of no thinking
    await client.messages.create(**body_of(**thinking))


async def test_an_answer_that_the_client_has_begun_goes_on(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(**body_of(messages=[*MESSAGES, {"role": "assistant", "content": "It is"}]))
    assert prompt(scripted).endswith("assistant\nIt is")


async def test_thinking_has_a_budget(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    script(scripted, "Sunny.", tokenizer_of("qwen3"))
    await client.messages.create(**body_of(thinking={"type": "enabled", "budget_tokens": 1234}))
    await scripted.openai.chat.completions.create(
        model="scripted", messages=MESSAGES, extra_body={"thinking_token_budget": 1234}
    )
    first, second = scripted.service.requests
    assert first.params.grammar == second.params.grammar is not None
    assert first.params.thinking_budget == second.params.thinking_budget == (1234, "<think>", "</think>")


async def test_what_claude_code_sends_is_answered(scripted: Api) -> None:
    """Its system prompt begins with a text that changes with each request, which must not be in the
    prompt."""
    prompts = []
    for number in (1, 2):
        body = body_of(
            max_tokens=32_000,
            temperature=1,
            top_k=5,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            metadata={"user_id": "user_1_account_2_session_3"},
            tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            output_config={"effort": "medium"},
            stream=True,
        )
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
        answer = await scripted.http.post("/v1/messages?beta=true", json=body, headers=headers)
        assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        prompts.append(prompt(scripted))
    assert prompts[0] == prompts[1]
    assert "billing" not in prompts[0]
    assert "<|im_start|>system\nYou are an agent." in prompts[0]
    assert "web_search" not in prompts[0]
    assert scripted.service.requests[-1].params.top_k == 5


async def test_a_schema_binds_the_text(live: Api) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "boolean"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = await live.http.post("/v1/messages", json=body_of(model="babbler", output_config=config))
    assert isinstance(json.loads(answer.json()["content"][0]["text"])["capital"], bool)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content"),
        ({"system": [{"type": "image", "source": {}}]}, "system"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        (
            {
                "tools": [
                    {"type": "bash_20250124", "name": "bash"},
                    {"name": "odd", "input_schema": {"properties": {"a": {"not": {}}}}},
                ],
                "tool_choice": {"type": "any"},
            },
            "tools[1].input_schema",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
    ],
)
async def test_refusals_name_the_field_that_was_sent(
    scripted: Api, client: anthropic.AsyncAnthropic, change: dict[str, Any], field: str
) -> None:
    answer = await scripted.http.post("/v1/messages", json=body_of(**change))
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert f"`{field}`" in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_errors_have_anthropics_shape(scripted: Api, client: anthropic.AsyncAnthropic) -> None:
    asked = [
        ("POST", "/v1/messages", {"content": b"{"}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"json": body_of(model="other")}, 404, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", {"json": {"messages": 1}}, 400, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {"json": {}}, 404, "not_found_error"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/messages", {"content": b"{"}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"content": b"x" * 2**21}, 413, "request_too_large"),
        ("POST", "/v1/messages", {"headers": {"x": "y" * 40_000}}, 431, "invalid_request_error"),
    ]
    for method, path, how, status, kind in asked:
        answer = await scripted.http.request(method, path, **how)  # type: ignore[arg-type]
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    script(scripted, "Sunny.")
    for error, status, kind in (
        (OverloadedError("full", retry_after_s=3), 429, "rate_limit_error"),
        (UnavailableError("none"), 503, "overloaded_error"),
        (EngineError("it failed"), 500, "api_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ):
        for at in (0, 1):
            scripted.service.error, scripted.service.error_at = error, at
            with pytest.raises(anthropic.APIStatusError) as failed:
                await gather(client, body_of())
            body: Any = failed.value.body
            assert failed.value.status_code == (200 if at else status)
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert "secret" not in str(body)


async def test_its_clients_key_is_read() -> None:
    keys = KeyRing({})
    service = ScriptedService(tokenizer_of("hermes"))
    app = create_app(service, AsyncAdmissionQueue(4, 2), make_limits(), Recorder(), access=Access(lambda: keys))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as http:
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            await strict_anthropic(http).messages.create(**body_of())
