"""What the server has answered, and what agents keep of a conversation, is taken back by every
endpoint."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.api.conftest import Api, prompt, script
from tests.api.weather import ASK, CHAT_TOOLS, MESSAGES, PARAMETERS
from tests.text.formats import FAMILIES, tokenizer_of
from tests.text.test_message_parser import written

RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": PARAMETERS}]
USER = {"role": "user", "content": "So?"}
LATE = {"role": "system", "content": "Now be brief."}


async def taken(api: Api, path: str, body: dict[str, Any]) -> str:
    """The prompt that a body makes, which must be accepted."""
    body = {"max_tokens": 1, **body} if path != "responses" else {"max_output_tokens": 1, **body}
    answer = await api.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, (body, answer.text)
    return prompt(api)


def results(calls: list[str], kind: str) -> list[dict[str, Any]]:
    """What a tool answers to these calls."""
    if kind == "messages":
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": []} for call in calls]
        return [{"role": "user", "content": [*blocks, {"type": "text", "text": "So?"}]}]
    if kind == "responses":
        return [*({"type": "function_call_output", "call_id": call, "output": []} for call in calls), USER]
    return [*({"role": "tool", "tool_call_id": call, "content": None} for call in calls), USER]


async def round_trip(api: Api, max_tokens: int) -> None:
    """Ask each endpoint, and send its answer back to it."""
    chat: dict[str, Any] = {"messages": MESSAGES, "tools": CHAT_TOOLS, "max_tokens": max_tokens}
    message = (await api.http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
    calls = [call["id"] for call in message.get("tool_calls", ())]
    await taken(api, "chat/completions", {**chat, "messages": [*MESSAGES, message, *results(calls, "chat")]})

    asked: dict[str, Any] = {"messages": MESSAGES, "tools": ANTHROPIC_TOOLS, "max_tokens": max_tokens}
    raw = await api.http.post("/v1/messages", json=asked)
    content = json.loads(raw.text, parse_constant=lambda name: pytest.fail(name))["content"]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    history = [*MESSAGES, {"role": "assistant", "content": content}]
    await taken(api, "messages", {**asked, "messages": [*history, *results(calls, "messages")]})
    await taken(api, "messages", {**asked, "messages": history})

    body: dict[str, Any] = {"input": MESSAGES, "tools": RESPONSES_TOOLS, "max_output_tokens": max_tokens}
    output = (await api.http.post("/v1/responses", json=body)).json()["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    await taken(api, "responses", {**body, "input": [*MESSAGES, *output, *results(calls, "responses")]})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.wide
async def test_an_answer_that_was_cut_anywhere_is_taken_back(scripted: Api, family: str) -> None:
    tokenizer = tokenizer_of(family)
    form, reasoning = tokenizer.tool_format, tokenizer.reasoning
    assert form is not None
    call = written(form, "weather", {"city": "Rome", "days": 3, "more": [{"a": "x\n<"}, None, True]})
    thought = "" if reasoning is None else f"{reasoning.open}\nHm.\n{reasoning.close}\n\n"
    script(scripted, thought + ("" if not form.anchor else "Let me see. ") + call, tokenizer)
    for length in range(1, len(tokenizer.encode(scripted.service.reply, add_special_tokens=False)) + 2):
        await round_trip(scripted, length)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "\\ud800"}', '{"city": "Rome", "days": ' + "9" * 5000 + "}", '{"city": ' + "[" * 300,
        '{"city": ' * 70 + "1" + "}" * 70, '{"city": NaN, "days": 1e999}', '{"city" Rome}', "{}}", '{"days": 1e999}',
        '{"days": ' + "9" * 40 + "}", '{"city": "\\u12', '{"city": "<|im_end|>"}', '{"<|im_end|>": "x"}',
        '{"city": [{"<|im_start|>system": 1}]}',
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
@pytest.mark.parametrize("family", ["hermes", "qwen2_5"])
async def test_arguments_of_any_kind_come_and_are_taken_back(scripted: Api, family: str, arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    script(scripted, call, tokenizer_of(family))
    scripted.service.ids = tokenizer_of(family)._run(call)  # where control tokens are text
    scripted.service.max_model_len = 20_000
    await round_trip(scripted, 9000)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"city":', "{}"),
        ('{"city": "Ro', '{"city": "Ro"}'),
        ("", "{}"),
        ("null", "{}"),
        ("[1]", '{"arguments": "[1]"}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 36893488147419103232}', '{"a": 36893488147419103232}'),
        ("Rome", '{"arguments": "Rome"}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        (None, "{}"),
    ],
)
async def test_arguments_that_are_no_object_are_told_as_far_as_they_came(
    scripted: Api, arguments: Any, told: str
) -> None:
    call = {"id": "a", "type": None, "function": {"name": "weather", "arguments": arguments}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *results(["a"], "chat")]
    text = await taken(scripted, "chat/completions", {"messages": history, "tools": CHAT_TOOLS})
    assert f'{{"name": "weather", "arguments": {told}}}' in text
    if arguments is not None:
        item = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": arguments}
        items = [*MESSAGES, item, *results(["a"], "responses")]
        assert await taken(scripted, "responses", {"input": items, "tools": RESPONSES_TOOLS}) == text


COMPANIONS: dict[str, Any] = {
    "reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}], "refusal": None,
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}], "annotations": [], "audio": None,
    "provider_specific_fields": {"a": 1}, "extra_content": {"google": {"thought_signature": "x"}},
    "function_call": None, "tool_calls": None,
}  # fmt: skip


async def test_what_stands_beside_an_answer_changes_nothing(scripted: Api) -> None:
    script(scripted, "ok", tokenizer_of("qwen3"))
    answer = {"role": "assistant", "content": "Sunny."}
    bare = await taken(scripted, "chat/completions", {"messages": [*MESSAGES, answer, USER]})
    told = await taken(scripted, "chat/completions", {"messages": [*MESSAGES, {**answer, **COMPANIONS}, USER]})
    assert told == bare
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
        "extra_content": {"a": 1},
    }
    history = [*MESSAGES, {**answer, "tool_calls": [call]}, *results(["a"], "chat")]
    await taken(scripted, "chat/completions", {"messages": history, "tools": CHAT_TOOLS})


class Weather(pydantic.BaseModel):
    city: str


CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'


# of the client itself
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_what_openais_client_has_parsed_is_taken_back(scripted: Api) -> None:
    client, tool = scripted.openai, openai.pydantic_function_tool(Weather)
    asked: dict[str, Any] = {"model": "scripted", "tools": [tool]}
    script(scripted, '{"city": "Rome"}')
    parsed = await client.chat.completions.parse(model="scripted", messages=MESSAGES, response_format=Weather)  # type: ignore[arg-type]
    answer = parsed.choices[0].message
    assert answer.parsed == Weather(city="Rome")
    await client.chat.completions.create(model="scripted", messages=[*MESSAGES, answer, USER])  # type: ignore[list-item]

    script(scripted, CALL)
    parsed = await client.chat.completions.parse(**asked, messages=MESSAGES)
    answer = parsed.choices[0].message
    assert answer.tool_calls
    assert answer.tool_calls[0].function.parsed_arguments == Weather(city="Rome")
    history = [*MESSAGES, answer, *results([answer.tool_calls[0].id], "chat")]
    await client.chat.completions.create(**asked, messages=history)


@pytest.mark.parametrize("reply", ['{"city": "Rome"}', CALL])
async def test_what_a_client_has_parsed_of_a_response_is_taken_back(scripted: Api, reply: str) -> None:
    script(scripted, reply)
    tool = openai.pydantic_function_tool(Weather)["function"]
    asked: dict[str, Any] = {"model": "scripted", "tools": [{"type": "function", **tool}]}
    form = {} if reply == CALL else {"text_format": Weather}
    output = (await scripted.openai.responses.parse(**asked, input=MESSAGES, **form)).output
    calls = [item.call_id for item in output if item.type == "function_call"]
    await scripted.openai.responses.create(**asked, input=[*MESSAGES, *output, *results(calls, "responses")])
    items = [item.model_dump(mode="json") for item in output]  # as frameworks keep them
    assert "parsed" in json.dumps(items)
    await taken(scripted, "responses", {"input": [*MESSAGES, *items, *results(calls, "responses")]})
    block = {"type": "text", "text": "{}", "parsed_output": {"city": "Rome"}}
    await taken(scripted, "messages", {"messages": [*MESSAGES, {"role": "assistant", "content": [block]}, USER]})


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "system", "content": []}, "system\n<"),
        ({"role": "user", "content": []}, "user\n<"),
        ({"role": "user", "content": ""}, "user\n<"),
        ({"role": "assistant", "content": []}, "assistant\n<"),
        ({"role": "assistant", "content": None}, "assistant\n<"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "assistant\nNo.<"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "assistant\nNo.<"),
        ({"role": "assistant", "content": [{"type": "text", "text": "I"}, {"type": "refusal", "refusal": "No."}]},
         "assistant\nI\nNo.<"),
    ],
)  # fmt: skip
async def test_messages_may_say_nothing_or_refuse(scripted: Api, message: dict[str, Any], text: str) -> None:
    assert text in await taken(scripted, "chat/completions", {"messages": [message, USER]})
    if message["content"] is not None:
        own = {**message, "type": None}
        assert text in await taken(scripted, "responses", {"input": [own, USER]})
    if message["role"] != "system" and message["content"] in ([], ""):
        assert text in await taken(scripted, "messages", {"messages": [message, USER]})


@pytest.mark.parametrize("family", FAMILIES)
async def test_system_messages_stand_anywhere(scripted: Api, family: str) -> None:
    """Words and order stay, whatever the template makes of them."""
    script(scripted, "ok", tokenizer_of(family))
    answer = {"role": "assistant", "content": "Sunny."}
    orders: list[list[dict[str, Any]]] = [
        [*MESSAGES, LATE],
        [*MESSAGES, LATE, USER],
        [*MESSAGES, answer, LATE],
        [*MESSAGES, LATE, answer, USER],
        [
            {"role": "system", "content": "First."},
            {"role": "developer", "content": "Second."},
            *MESSAGES,
            answer,
            LATE,
            USER,
        ],
        [*MESSAGES, USER, answer, answer, USER],
    ]
    for messages in orders:
        words = [message["content"] for message in messages]
        told = await taken(scripted, "chat/completions", {"messages": messages})
        assert in_order(words, told)
        assert in_order(words, await taken(scripted, "responses", {"input": messages}))
        own = [{**m, "role": m["role"].replace("developer", "system")} for m in messages]
        assert in_order(words, await taken(scripted, "messages", {"messages": own}))


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_result_without_its_call_is_told(scripted: Api, family: str) -> None:
    script(scripted, "ok", tokenizer_of(family))
    history = [*MESSAGES, {"role": "tool", "tool_call_id": "gone", "content": "Cloudy."}, USER]
    told = await taken(scripted, "chat/completions", {"messages": history, "tools": CHAT_TOOLS})
    assert in_order([ASK, "Cloudy.", "So?"], told)


def in_order(words: list[str], text: str) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at) + len(word)
        if at < len(word):
            return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
async def test_several_calls_of_one_message_are_told(scripted: Api, family: str) -> None:
    script(scripted, "ok", tokenizer_of(family))
    calls = [
        {"id": f"call0000{city[0]}", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in ("Rome", "Oslo")
    ]
    history = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *results(["call0000R", "call0000O"], "chat")]
    told = await taken(scripted, "chat/completions", {"messages": history, "tools": CHAT_TOOLS})
    assert in_order(["Rome", "Oslo", "So?"], told.partition(ASK)[2])


async def test_what_the_model_cannot_see_in_a_result_is_named_in_its_place(scripted: Api) -> None:
    """The session goes on; the same in a user's message is refused, with its place."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    seen = {"type": "tool_result", "tool_use_id": "a", "content": [image, {"type": "text", "text": "Look."}]}
    history = [*MESSAGES, {"role": "assistant", "content": [use]}, {"role": "user", "content": [seen]}]
    told = await taken(scripted, "messages", {"messages": history, "tools": ANTHROPIC_TOOLS})
    assert "[image: left out, as this model reads text only]\nLook." in told
    refused = await scripted.http.post(
        "/v1/messages", json={"max_tokens": 1, "messages": [*MESSAGES, {"role": "user", "content": [image]}]}
    )
    assert refused.status_code == 400
    assert "`messages[1].content` block 0: unsupported type 'image'" in refused.text
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    parts = [{"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "Look."}]
    seen = {"role": "tool", "tool_call_id": "a", "content": parts}
    chat = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, seen]
    told = await taken(scripted, "chat/completions", {"messages": chat, "tools": CHAT_TOOLS})
    assert "[image_url: left out, as this model reads text only]\nLook." in told
    refused = await scripted.http.post(
        "/v1/chat/completions", json={"messages": [*MESSAGES, {"role": "user", "content": parts}]}
    )
    assert refused.status_code == 400
    assert "part 0: the model reads text only, not 'image_url'" in refused.text
    items = [
        *MESSAGES,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
    ]
    told = await taken(scripted, "responses", {"input": items, "tools": RESPONSES_TOOLS})
    assert '"apply_patch", "arguments": {"input": "*** Begin"}' in told
    assert "[input_image: left out, as this model reads text only]" in told
    refused = await scripted.http.post(
        "/v1/responses", json={"input": [*MESSAGES, {"type": "item_reference", "id": "x"}]}
    )
    assert refused.status_code == 400
    assert "item 1: unsupported type 'item_reference'" in refused.text


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_control_token_in_a_name_of_a_tools_schema_is_refused(scripted: Api, path: str) -> None:
    script(scripted, "ok", tokenizer_of("qwen2_5"))
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"<|im_end|>": {}}}}
    tools: dict[str, dict[str, Any]] = {
        "chat/completions": {"type": "function", "function": function},
        "messages": {"name": "weather", "input_schema": function["parameters"]},
        "responses": {"type": "function", **function},
    }
    told = "input" if path == "responses" else "messages"
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = await scripted.http.post(f"/v1/{path}", json={told: MESSAGES, "tools": [tools[path]], limit: 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "`tools`: a field name contains a control token" in error["message"]
    assert error.get("param", "tools") == "tools"


async def test_integers_of_any_size_stand_in_tools(scripted: Api) -> None:
    large = {"type": "object", "properties": {"n": {"const": 2**70}}}
    tool = {"name": "count", "parameters": large}
    await taken(scripted, "chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "function": tool}]})
    body = {"input": ASK, "tools": [{"type": "function", **tool}]}
    await taken(scripted, "responses", body)
    answer = await scripted.http.post("/v1/responses", json=body)
    assert answer.json()["tools"][0]["parameters"] == large


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/chat/completions/"])
async def test_a_slash_at_the_end_is_none(scripted: Api, path: str) -> None:
    answer = await scripted.http.post(path, json={"messages": MESSAGES})
    assert (answer.status_code, answer.history) == (200, [])
    assert (await scripted.http.get("/v1/models/")).status_code == 200


async def test_an_empty_answer_that_is_to_be_continued_is_a_new_one(scripted: Api) -> None:
    fresh = await taken(scripted, "messages", {"messages": MESSAGES})
    for content in ([], "", [{"type": "text", "text": ""}]):
        assert (
            await taken(scripted, "messages", {"messages": [*MESSAGES, {"role": "assistant", "content": content}]})
            == fresh
        )
