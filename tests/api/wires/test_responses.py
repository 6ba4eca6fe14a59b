"""POST /v1/responses, read by the `openai` client, which checks every event and object against its
types."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from serve_app.api.request_events import Outcome
from serve_app.errors import EngineError, OverloadedError
from tests.api.conftest import Api, prompt, script
from tests.api.sdks import strict_openai
from tests.api.weather import ASK, CALL, MESSAGES, PARAMETERS, THOUGHT
from tests.text.formats import tokenizer_of

WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "Tells it", "parameters": PARAMETERS}
TOOLS: list[Any] = [WEATHER, {"type": "function", "name": "stop", "strict": False}]


class Weather(BaseModel):
    city: str
    days: int


def strict(api: Api) -> openai.AsyncOpenAI:
    return strict_openai(api.http, str(api.http.base_url).rstrip("/"))


def plain(response: Response) -> list[tuple[str, ...]]:
    """The output without names of its own."""
    told: list[tuple[str, ...]] = []
    for item in response.output:
        match item.type:
            case "message":
                told.append(("text", "".join(part.text for part in item.content if part.type == "output_text")))
            case "reasoning":
                told.append(("reasoning", "".join(part.text for part in item.content or ())))
            case "function_call":
                told.append(("call", item.name, item.arguments))
    return told


async def stream(api: Api, body: dict[str, Any]) -> tuple[list[Any], Response]:
    """All events, checked to be numbered and whole, and the last one's response."""
    events = [event async for event in await strict(api).responses.create(**body, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1].response
    assert done == last.output
    for item in done:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas.get(item.id, "") == text
    return events, last


async def test_a_text(api: Api) -> None:
    answer = await strict(api).responses.create(model="scripted", input="Capital of France?", max_output_tokens=50)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "scripted")
    assert answer.output_text == "Paris is the capital of France."
    assert (answer.max_output_tokens, answer.store, answer.error) == (50, False, None)
    asked = len(api.service.tokenizer.apply_chat_template([{"role": "user", "content": "Capital of France?"}]))
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (asked, 8, asked + 8)
    assert usage.input_tokens_details.cached_tokens == 1
    _, last = await stream(api, {"model": "scripted", "input": "Capital of France?"})
    assert (plain(last), last.usage, last.status) == (plain(answer), usage, "completed")
    assert [end[:2] for end in api.observer.ended] == [("responses", Outcome.COMPLETED)] * 2


async def test_an_answer_that_is_cut_is_incomplete(api: Api) -> None:
    body: dict[str, Any] = {"model": "scripted", "input": "?", "max_output_tokens": 2}
    answer = await strict(api).responses.create(**body)
    events, last = await stream(api, body)
    assert events[-1].type == "response.incomplete"
    for response in (answer, last):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert response.output_text == "Paris is"


@pytest.mark.parametrize(
    ("reply", "family", "output"),
    [
        (f"Let me see.\n{CALL}", "hermes", ["text", "call"]),
        (f"{CALL}\n{CALL.replace('Rome', 'Oslo')}", "hermes", ["call", "call"]),
        ("No call.", "hermes", ["text"]),
        ("", "hermes", ["text"]),
        (f"{THOUGHT}Sunny.", "qwen3", ["reasoning", "text"]),
        (f"{THOUGHT}{CALL}", "qwen3", ["reasoning", "call"]),
        ("<think>\nAnd so on", "qwen3", ["reasoning"]),
    ],
    ids=["text and call", "two calls", "no call", "nothing", "reasoning", "reasoning and call", "reasoning alone"],
)
async def test_events_add_up_to_the_whole_and_to_chats_message(
    scripted: Api, reply: str, family: str, output: list[str]
) -> None:
    script(scripted, reply, tokenizer_of(family))
    body: dict[str, Any] = {"model": "scripted", "input": ASK, "tools": TOOLS}
    whole = plain(await strict(scripted).responses.create(**body))
    _, streamed = await stream(scripted, body)
    assert [item[0] for item in whole] == output
    assert plain(streamed) == whole
    tools: list[Any] = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS]
    chat = await scripted.openai.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools)
    message = chat.choices[0].message
    assert "".join(item[1] for item in whole if item[0] == "text") == (message.content or "")
    assert [item[1:] for item in whole if item[0] == "call"] == [
        (call.function.name, call.function.arguments) for call in message.tool_calls or () if call.type == "function"
    ]
    assert [item[1] for item in whole if item[0] == "reasoning"] == [
        *filter(None, [getattr(message, "reasoning_content", None)])
    ]
    first, *_, last = scripted.service.requests
    assert first.prompt_token_ids == last.prompt_token_ids
    assert first.params.grammar == last.params.grammar


async def test_the_clients_own_stream_gathers_the_answer(scripted: Api) -> None:
    script(scripted, CALL)
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    own: Any = {"type": "function", **tool}
    async with strict(scripted).responses.stream(model="scripted", input=ASK, tools=[own]) as events:
        async for _ in events:
            pass
        final = await events.get_final_response()
    [call] = final.output
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Rome", "days": 3}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
async def test_a_required_call_comes_and_is_chats(live: Api, choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))
    body: dict[str, Any] = {
        "model": "babbler", "input": ASK, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False,
        "extra_body": {"seed": 1},
    }  # fmt: skip
    answer = await strict(live).responses.create(**body)
    _, streamed = await stream(live, body)
    assert plain(streamed) == plain(answer)
    [(kind, name, arguments)] = plain(answer)
    assert (kind, name) == ("call", "weather")
    Weather.model_validate_json(arguments)
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    named = choice if choice == "required" else {"type": "function", "function": {"name": "weather"}}
    chat = await live.openai.chat.completions.create(
        model="babbler", messages=MESSAGES, tools=[{"type": "function", "function": function}], tool_choice=named,
        parallel_tool_calls=False, seed=1,
    )  # fmt: skip
    [call] = chat.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.arguments == arguments


async def test_a_schema_binds_the_text(live: Api) -> None:
    class City(BaseModel):
        capital: bool

    answer = await strict(live).responses.parse(model="babbler", input=ASK, text_format=City)
    assert isinstance(answer.output_parsed, City)


async def test_the_history_is_chats(scripted: Api) -> None:
    """What was answered goes back as the client keeps it, with what the tools said."""
    script(scripted, f"{THOUGHT}Let me see.\n{CALL}", tokenizer_of("qwen3"))
    first = await strict(scripted).responses.create(
        model="scripted", input=[{"role": "user", "content": ASK}], tools=TOOLS, instructions="Be brief."
    )
    call = first.output[-1]
    assert call.type == "function_call"
    history: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]},
        {"role": "user", "content": ASK},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."},
    ]
    await strict(scripted).responses.create(
        model="scripted", input=history, tools=TOOLS, instructions="Be brief.", store=False
    )
    asked = scripted.service.requests[-1].prompt_token_ids
    function = {"name": "weather", "arguments": call.arguments}
    await scripted.openai.chat.completions.create(
        model="scripted",
        tools=[{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS],  # type: ignore[misc]
        messages=[
            {"role": "system", "content": "Be brief.\n\nNo jokes."},
            *MESSAGES,
            {
                "role": "assistant", "content": "Let me see.", "reasoning_content": "Rome.\nHm.",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."},
        ],
    )  # fmt: skip
    assert scripted.service.requests[-1].prompt_token_ids == asked


async def test_what_codex_sends_is_answered(scripted: Api) -> None:
    script(scripted, CALL)
    others = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "image_generation", "output_format": "png"},
    ]
    body = {
        "model": "scripted",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
        ],
        "tools": [others[0], {**WEATHER, "strict": False}, *others[1:]],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-thread",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    answer = await scripted.http.post("/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, nothing = answer.text.split("\n\n")
    assert nothing == ""
    for event in events:
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    last = json.loads(events[-1].split("\ndata: ")[1])
    assert last["type"] == "response.completed"
    assert last["response"]["usage"]["total_tokens"] > 0
    assert [item["type"] for item in last["response"]["output"]] == ["function_call"]
    assert "apply_patch" not in prompt(scripted)
    assert "You are a coding agent.\n\nSandboxed." in prompt(scripted)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"surprise": 1}, "surprise"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": 3}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "a", "result": "x", "status": "completed"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "word " * 3000}, "input"),
        ({"temperature": 9}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [{"type": "mcp"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [{"type": "mcp"}, {**WEATHER, "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}]},
            "tools[1].parameters",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
async def test_refusals_name_the_field_that_was_sent(scripted: Api, change: dict[str, Any], param: str) -> None:
    answer = await scripted.http.post("/v1/responses", json={"model": "scripted", "input": ASK, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"]


async def test_an_error_in_the_stream_is_told_and_the_response_has_failed(api: Api) -> None:
    for error, code in ((EngineError("the engine failed"), "server_error"), (RuntimeError("secret"), "server_error"),
                        (OverloadedError("too much"), "rate_limit_exceeded")):  # fmt: skip
        api.service.error, api.service.error_at = error, 2
        told: list[Any] = [
            event async for event in await strict(api).responses.create(model="scripted", input=ASK, stream=True)
        ]
        failure, last = told[-2:]
        assert failure.type == "error"
        assert "secret" not in failure.message
        assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", code)
        assert last.response.output == []
    assert {end[1] for end in api.observer.ended} == {Outcome.FAILED, Outcome.OVERLOADED}


@pytest.mark.parametrize("reply", ["Sunny.", THOUGHT + "Sunny for days.", THOUGHT + "Let me see." + CALL])
async def test_texts_come_with_log_probabilities(scripted: Api, reply: str) -> None:
    script(scripted, reply, tokenizer_of("qwen3"))
    include: Any = ["message.output_text.logprobs"]
    body: dict[str, Any] = {"model": "scripted", "input": ASK, "tools": TOOLS, "include": include, "top_logprobs": 2}
    whole = await strict(scripted).responses.create(**body)
    [text] = [part for item in whole.output if item.type == "message" for part in item.content]
    assert text.type == "output_text"
    assert "".join(token.token for token in text.logprobs or ()) == text.text
    assert {(token.logprob, len(token.top_logprobs)) for token in text.logprobs or ()} == {(-0.5, 2)}
    events, last = await stream(scripted, body)
    [again] = [part for item in last.output if item.type == "message" for part in item.content]
    assert again == text
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert ["".join(token.token for token in delta.logprobs) for delta in deltas] == [delta.delta for delta in deltas]
    without = await strict(scripted).responses.create(**{**body, "include": [], "top_logprobs": 0})
    assert [part.logprobs for item in without.output if item.type == "message" for part in item.content] == [[]]  # type: ignore[union-attr]
