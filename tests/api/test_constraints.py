"""`response_format` and `structured_outputs` over a real engine, and what cannot be enforced
refused by name."""

import json
from typing import Annotated, Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api

ASK: list[Any] = [{"role": "user", "content": "Order something."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["apple", "pear"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class Order(BaseModel):
    name: Annotated[str, Field(max_length=20)]  # random weights like long names
    count: int
    gift: bool


async def test_a_json_schema_is_followed_streamed_and_whole(live: Api) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
    body: dict[str, Any] = {"model": "babbler", "messages": ASK, "seed": 3, "response_format": wanted, "max_tokens": 60}
    answer = await live.openai.chat.completions.create(**body)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    chunks = [chunk async for chunk in await live.openai.chat.completions.create(**body, stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content


async def test_openais_parse_gives_a_model(live: Api) -> None:
    for seed in range(8):
        try:
            answer = await live.openai.chat.completions.parse(
                model="babbler", messages=ASK, response_format=Order, seed=seed, max_tokens=300
            )
        except openai.LengthFinishReasonError:  # and long numbers
            continue
        assert isinstance(answer.choices[0].message.parsed, Order)
        return
    pytest.fail("no answer ended within its 300 tokens")


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"json": SCHEMA}, lambda text: json.loads(text)["name"] in ("apple", "pear")),
        ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["name"] in ("apple", "pear")),
        ({"grammar": 'start: "a" | "b" start'}, lambda text: text.endswith("a") and set(text) <= {"a", "b"}),
    ],
    ids=["choice", "regex", "json", "json text", "grammar"],
)
async def test_structured_outputs_on_both_endpoints(live: Api, wanted: dict[str, Any], fits: Any) -> None:
    extra = {"structured_outputs": wanted}
    plain = await live.openai.completions.create(
        model="babbler", prompt=["One", "Two"], n=2, seed=1, max_tokens=60, extra_body=extra
    )
    chat = await live.openai.chat.completions.create(
        model="babbler", messages=ASK, seed=1, max_tokens=60, extra_body=extra
    )
    texts = [choice.text for choice in plain.choices] + [chat.choices[0].message.content or ""]
    assert len(texts) == 5
    assert all(map(fits, texts)), texts


async def test_json_object_begins_an_object(live: Api) -> None:
    answer = await live.openai.chat.completions.create(
        model="babbler", messages=ASK, seed=1, max_tokens=20, response_format={"type": "json_object"}
    )
    assert (answer.choices[0].message.content or "").startswith("{")


async def test_a_request_that_contradicts_itself_is_refused_when_it_shows(live: Api) -> None:
    """Not by a 500, which would be the server's fault and which clients repeat."""
    body: dict[str, Any] = {
        "model": "babbler",
        "prompt": "One",
        "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [0]},
    }
    with pytest.raises(openai.BadRequestError) as refused:
        await live.openai.completions.create(**body)
    assert refused.value.code == "no_token_left"
    with pytest.raises(openai.APIError) as ended:
        async for _ in await live.openai.completions.create(**body, stream=True):
            pass
    assert (ended.value.type, ended.value.code) == ("invalid_request_error", "no_token_left")


async def test_a_dead_end_in_an_answer_is_the_clients_error(live: Api, tokenizer: Tokenizer) -> None:
    """Behind "y" nothing can match; the walk before the request takes the other way."""
    rules = 'start: "x" | "y" NONE\nNONE: /a/ & /b/'
    [y] = tokenizer.encode("y", add_special_tokens=False)
    body: dict[str, Any] = {
        "model": "babbler",
        "prompt": "One",
        "logit_bias": {str(y): 100},
        "extra_body": {"structured_outputs": {"grammar": rules}},
    }
    with pytest.raises(openai.BadRequestError) as refused:
        await live.openai.completions.create(**body)
    assert refused.value.code == "grammar_unmatchable"
    with pytest.raises(openai.APIError) as ended:
        async for _ in await live.openai.completions.create(**body, stream=True):
            pass
    assert (ended.value.type, ended.value.code) == ("invalid_request_error", "grammar_unmatchable")


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(?:a?){5000}a{5000}"},
        {"regex": "\ud800"},
        {"choice": ["\ud800"]},
        {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(2500))},
        {"json": {"const": -(2**63)}},
        {"json": '{"minimum": 1e999}'},
        {"json": {"minimum": 2**53 + 1, "type": "integer"}},
        {"json": {"type": "string", "format": []}},
        {"json": {"properties": {"a": {}}, "patternProperties": {"^a$": {}}, "required": [["a"]]}},
        {"json": r'{"properties": {"\ud800": {"format": 5}}}'},
    ],
    ids=str,
)
async def test_what_llguidance_fails_on_is_refused_before_anything_runs(api: Api, wanted: dict[str, Any]) -> None:
    body = {"model": "scripted", "prompt": "One", "structured_outputs": wanted}
    headers = {"content-type": "application/json"}
    answer = await api.http.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400
    assert api.service.requests == []


@pytest.mark.parametrize(
    ("extra", "param", "said"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"items": {"not": {}}}},
                }
            },
            "response_format.json_schema.schema",
            "not",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-ahead"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json", "JSON object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "not a field"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "grammar"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "one of them",
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(api: Api, extra: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.openai.chat.completions.create(model="scripted", messages=ASK, extra_body=extra)
    assert refused.value.param == param
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ({"json": {"not": {}}}, "grammar_unsupported"),
        ({"json": "[1"}, "grammar_invalid"),
        ({"regex": "("}, "grammar_invalid"),
        ({"grammar": "start: nothing"}, "grammar_invalid"),
        ({"choice": ["x" * 2**18]}, "grammar_too_large"),
        ({"json": {"minLength": 2, "maxLength": 1, "type": "string"}}, "grammar_unsupported"),
    ],
)
async def test_refusals_have_codes_that_are_counted(api: Api, wanted: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.openai.chat.completions.create(
            model="scripted", messages=ASK, extra_body={"structured_outputs": wanted}
        )
    assert refused.value.code == code
    assert api.observer.grammars == [code]


async def test_the_time_to_build_a_grammar_is_told(api: Api) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    await api.openai.chat.completions.create(model="scripted", messages=ASK, extra_body=extra)
    [seconds] = api.observer.grammars
    assert isinstance(seconds, float)


async def test_plain_text_is_no_constraint(api: Api) -> None:
    await api.openai.chat.completions.create(model="scripted", messages=ASK, response_format={"type": "text"})
    assert api.service.requests[-1].params.grammar is None
