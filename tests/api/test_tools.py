"""Tools and reasoning over the API, with OpenAI's client: a real engine of random weights, and
scripted answers."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.api.conftest import Api, prompt, script
from tests.api.weather import CALL, CHAT_TOOLS, MESSAGES, PARAMETERS
from tests.text.formats import tokenizer_of


@pytest.fixture(autouse=True)
def hermes(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live server's operator has named a format."""
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))


async def gather(api: Api, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The messages that a stream adds up to, with their finish reasons."""
    messages: dict[int, dict[str, Any]] = {}
    async for chunk in await api.openai.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": None, "calls": [], "reasoning": None})
            delta = choice.delta
            if delta.content is not None:
                message["content"] = (message["content"] or "") + delta.content
            if thought := getattr(delta, "reasoning_content", None):
                message["reasoning"] = (message["reasoning"] or "") + thought
            for call in delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    assert call.type == "function"
                    message["calls"].append([call.id, call.function.name, ""])
                message["calls"][call.index][2] += call.function.arguments or ""
            if choice.finish_reason is not None:
                message["finish_reason"] = choice.finish_reason
    return messages


def plain(choice: Any) -> dict[str, Any]:
    calls = choice.message.tool_calls or ()
    return {
        "content": choice.message.content,
        "calls": [[call.id, call.function.name, call.function.arguments] for call in calls],
        "reasoning": getattr(choice.message, "reasoning_content", None),
        "finish_reason": choice.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls are the request's own; and a message that says nothing says it as null or as an
    empty text."""
    return {**message, "calls": [call[1:] for call in message["calls"]], "content": message["content"] or ""}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "stop"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "stop"}}],
                },
            },
            {"stop"},
        ),
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_required_call_comes_and_validates(live: Api, choice: Any, names: set[str]) -> None:
    body: dict[str, Any] = {
        "model": "babbler", "messages": MESSAGES, "tools": CHAT_TOOLS, "tool_choice": choice, "n": 3, "seed": 1,
        "parallel_tool_calls": False,
    }  # fmt: skip
    answer = await live.openai.chat.completions.create(**body)
    streamed = await gather(live, body)
    for told in answer.choices:
        assert told.finish_reason == "tool_calls"
        assert told.message.content is None
        [call] = told.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in names
        assert call.id.startswith("call_")
        assert len(call.id) == 29
        schema = PARAMETERS if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert without_ids(plain(told)) == without_ids(streamed[told.index])
    ids = [call.id for told in answer.choices for call in told.message.tool_calls or ()]
    assert len(set(ids)) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 30


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=99)


async def test_openais_parse_gives_the_arguments_as_a_model(live: Api) -> None:
    answer = await live.openai.chat.completions.parse(
        model="babbler",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        seed=2,
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    async with live.openai.chat.completions.stream(
        model="babbler",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        seed=2,
        parallel_tool_calls=False,
    ) as stream:
        final = await stream.get_final_completion()
    [again] = final.choices[0].message.tool_calls or ()
    assert again.function.parsed_arguments == call.function.parsed_arguments


async def test_calls_and_results_go_back_into_the_conversation(live: Api) -> None:
    body: dict[str, Any] = {
        "model": "babbler",
        "messages": MESSAGES,
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "seed": 1,
    }
    answer = (await live.openai.chat.completions.create(**body, parallel_tool_calls=False)).choices[0].message
    [call] = answer.tool_calls or ()
    history = [*MESSAGES, answer, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = await live.openai.chat.completions.create(
        model="babbler", messages=history, tools=CHAT_TOOLS, tool_choice="none", seed=1, max_tokens=5
    )
    assert after.choices[0].message.tool_calls is None
    assert after.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("reply", "content", "calls", "reason"),
    [
        ("It is sunny.", "It is sunny.", [], "stop"),
        (f"Let me see.\n{CALL}", "Let me see.", ["weather"], "tool_calls"),
        (f"{CALL}\n{CALL}", None, ["weather", "weather"], "tool_calls"),
        ('<tool_call>\n{"name": "unknown"', '<tool_call>\n{"name": "unknown"', [], "stop"),
        (f" {CALL[:-14]}", None, ["weather"], "tool_calls"),
        (f" {CALL[:-20]}", None, ["weather"], "stop"),
        ("", "", [], "stop"),
    ],
    ids=["text", "text and call", "two calls", "no call", "no end", "half a call", "nothing"],
)
async def test_streamed_and_whole_messages_agree(
    scripted: Api, reply: str, content: str | None, calls: list[str], reason: str
) -> None:
    script(scripted, reply)
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "tools": CHAT_TOOLS}
    whole = plain((await scripted.openai.chat.completions.create(**body)).choices[0])
    assert (whole["content"], [call[1] for call in whole["calls"]]) == (content, calls)
    assert whole["finish_reason"] == reason
    streamed = await gather(scripted, body)
    assert without_ids(streamed[0]) == without_ids(whole)


async def test_a_call_that_is_cut_ends_for_its_length(scripted: Api) -> None:
    script(scripted, CALL)
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "tools": CHAT_TOOLS, "max_tokens": 20}
    whole = plain((await scripted.openai.chat.completions.create(**body)).choices[0])
    assert whole["finish_reason"] == "length"
    assert json.dumps({"city": "Rome", "days": 3}).startswith(whole["calls"][0][2])
    assert without_ids((await gather(scripted, body))[0]) == without_ids(whole)


async def test_a_stop_string_cuts_no_call(scripted: Api) -> None:
    """Neither its name, its arguments nor its marks are content; what follows it is."""
    script(scripted, f"{CALL}\nIn Oslo it rains for days.")
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "tools": CHAT_TOOLS, "stop": " days"}
    for stop, text in ((" days", "In Oslo it rains for"), ("</tool_call>", "In Oslo it rains for days."), ("\n", None)):
        whole = plain((await scripted.openai.chat.completions.create(**{**body, "stop": stop})).choices[0])
        told = (whole["content"] or None, whole["finish_reason"], [json.loads(call[2]) for call in whole["calls"]])
        assert told == (text or "In Oslo it rains for days.", "tool_calls", [{"city": "Rome", "days": 3}])
        assert without_ids((await gather(scripted, {**body, "stop": stop}))[0]) == without_ids(whole)


async def test_a_named_tool_is_called_once(live: Api) -> None:
    """By a model that would go on, unless the client asks for more."""
    named: Any = {"type": "function", "function": {"name": "stop"}}
    for more, calls in (({}, 1), ({"parallel_tool_calls": True}, 2)):
        answer = await live.openai.chat.completions.create(
            model="babbler", messages=MESSAGES, tools=CHAT_TOOLS, tool_choice=named, seed=1, max_tokens=60,
            logit_bias={"2": -100}, **more,
        )  # fmt: skip
        assert len(answer.choices[0].message.tool_calls or ()) >= calls
        assert (len(answer.choices[0].message.tool_calls or ()) == 1) is (calls == 1)


async def test_without_a_choice_a_call_is_text(scripted: Api) -> None:
    script(scripted, CALL)
    for extra in ({}, {"tools": CHAT_TOOLS, "tool_choice": "none"}, {"tools": []}):
        answer = await scripted.openai.chat.completions.create(model="scripted", messages=MESSAGES, **extra)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == CALL
        assert scripted.service.requests[-1].params.grammar is None


async def test_log_probabilities_are_the_contents(scripted: Api) -> None:
    script(scripted, f"<think>\nRome.\n</think>\n\nSunny.\n{CALL}", tokenizer_of("qwen3"))
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES, "tools": CHAT_TOOLS, "logprobs": True}
    whole = (await scripted.openai.chat.completions.create(**body)).choices[0]
    assert whole.logprobs is not None
    assert "".join(entry.token for entry in whole.logprobs.content or ()) == whole.message.content == "Sunny."
    streamed = [
        entry.token
        async for chunk in await scripted.openai.chat.completions.create(**body, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs and choice.logprobs.content) or ()
    ]
    assert "".join(streamed) == "Sunny."


async def test_reasoning_comes_apart_and_goes_back(scripted: Api) -> None:
    script(scripted, "<think>\nRome.\nHm.\n</think>\n\nSunny.", tokenizer_of("qwen3"))
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES}
    answer = await scripted.openai.chat.completions.create(**body)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thought = tokenizer_of("qwen3").encode("<think>\nRome.\nHm.\n</think>", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)
    whole = plain(answer.choices[0])
    assert whole == {"content": "Sunny.", "calls": [], "reasoning": "Rome.\nHm.", "finish_reason": "stop"}
    assert (await gather(scripted, body))[0] == whole
    history = [*MESSAGES, {"role": "assistant", "content": "Sunny.", "reasoning_content": "Rome."}, *MESSAGES]
    await scripted.openai.chat.completions.create(model="scripted", messages=history)


@pytest.mark.parametrize(
    ("extra", "closed"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, True),
    ],
)
async def test_reasoning_is_switched_by_the_request(scripted: Api, extra: dict[str, Any], closed: bool) -> None:
    script(scripted, "Sunny.", tokenizer_of("qwen3"))
    answer = await scripted.openai.chat.completions.create(model="scripted", messages=MESSAGES, **extra)
    prompt = scripted.service.tokenizer.decode(scripted.service.requests[-1].prompt_token_ids)
    assert prompt.endswith("</think>\n\n") is closed
    assert answer.choices[0].message.content == "Sunny."


async def test_a_reasoning_has_a_budget(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random tokens, which would hardly ever close it."""
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("qwen3_5_think"))
    close = live.service.tokenizer.encode("</think>", add_special_tokens=False)
    for budget in (0, 7):
        body: dict[str, Any] = {
            "model": "babbler",
            "messages": MESSAGES,
            "seed": 1,
            "max_tokens": 40,
            "extra_body": {"thinking_token_budget": budget},
        }
        answer = await live.openai.chat.completions.create(**body)
        usage = answer.usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert budget <= usage.completion_tokens_details.reasoning_tokens - len(close) <= budget + 3  # type: ignore[operator]
        whole = plain(answer.choices[0])
        assert bool(whole["reasoning"]) is bool(budget)
        assert whole["content"]
        assert (await gather(live, body))[0] == whole


async def test_a_budget_for_no_reasoning_is_refused(scripted: Api) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.openai.chat.completions.create(
            model="scripted", messages=MESSAGES, extra_body={"thinking_token_budget": 5}
        )
    assert refused.value.param == "thinking_token_budget"


async def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_would_be(scripted: Api) -> None:
    odd = [{"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}}}]
    body: dict[str, Any] = {"model": "scripted", "messages": MESSAGES}
    await scripted.openai.chat.completions.create(**body, tools=odd)
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.openai.chat.completions.create(**body, tools=odd, tool_choice="required")
    assert refused.value.param == "tools[0].function.parameters"
    assert "not" in refused.value.message


@pytest.mark.parametrize("family", ["hermes", "qwen3", "llama3_1"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"tool_choice": "none"},
        {"tool_choice": "required", "add_generation_prompt": False},
        {"reasoning_effort": "none"},
    ],
    ids=str,
)
async def test_tokenize_tells_the_prompt_of_a_chat_with_tools(
    scripted: Api, family: str, extra: dict[str, Any]
) -> None:
    script(scripted, "", tokenizer_of(family))
    body = {"model": "scripted", "messages": MESSAGES, "tools": CHAT_TOOLS, **extra}
    told = (await scripted.http.post("/tokenize", json=body)).json()
    await scripted.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert tuple(told["tokens"]) == scripted.service.requests[-1].prompt_token_ids
    assert ("weather" in prompt(scripted)) is (extra.get("tool_choice") != "none")


async def test_tokenize_refuses_tools_as_chat_does(scripted: Api) -> None:
    for body, param in (
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"prompt": "x", "tools": CHAT_TOOLS}, "tools"),
    ):
        refused = await scripted.http.post("/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
