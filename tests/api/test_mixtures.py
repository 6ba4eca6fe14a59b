"""Everything that a chat may ask for, in one request: a stream adds up to what the same request
says at once."""

import json
from collections import defaultdict
from typing import Any

import jsonschema
import pytest

from tests.api.conftest import Api
from tests.text.formats import tokenizer_of

ASK: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
    "additionalProperties": False,
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"type": "number", "minimum": 0, "maximum": 9},
        "名前": {"anyOf": [{"type": "string", "pattern": "^[a-zé]{1,3}$"}, {"type": "null"}]},
        "tree": {"$ref": "#/$defs/tree"},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["größe", "名前", "tree", "day"],
    "additionalProperties": False,
    "$defs": {"tree": TREE},
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": CITY, "strict": True}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
FORMAT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}
DETAILS: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
MIXTURES: dict[str, dict[str, Any]] = {
    "answer": {**FORMAT, **DETAILS},
    "answer or call": {**FORMAT, **TOOLS, **DETAILS},
    "call": {**TOOLS, **DETAILS, "tool_choice": "required", "parallel_tool_calls": False},
    "calls until a stop string": {**TOOLS, **DETAILS, "tool_choice": "required", "stop": ["day", "Oslo"]},
    "answer until a stop string": {**FORMAT, **DETAILS, "stop": ["tree"], "include_stop_str_in_output": True},
    "text or call": {**TOOLS, **DETAILS, "stop": ["e", "<"], "max_tokens": 40},
    "no call": {**TOOLS, **FORMAT, **DETAILS, "tool_choice": "none"},
    "with a bias": {**FORMAT, **DETAILS, "logit_bias": {"18": 5, "2": 100}, "repetition_penalty": 1.3, "min_p": 0.1},
}


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """What a delta adds to a message, as OpenAI says."""
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append({"type": part["type"], "function": {"name": "", "arguments": ""}})
                for field, text in part["function"].items():
                    calls[part["index"]]["function"][field] += text
        elif isinstance(value, str) and key != "role":
            message[key] = message.get(key, "") + value


async def streamed(api: Api, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Choices by number."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"message": {}, "entries": [], "token_ids": []})
    async with api.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for told in json.loads(line.removeprefix("data: "))["choices"]:
                choice = choices[told["index"]]
                add(choice["message"], told["delta"])
                choice["entries"] += (told.get("logprobs") or {}).get("content", [])
                choice["token_ids"] += told.get("token_ids", [])
                if told["finish_reason"] is not None:
                    choice |= {"finish_reason": told["finish_reason"], "stop_reason": told.get("stop_reason")}
                    choices[told["index"]] = choice
    return dict(choices)


async def whole(api: Api, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Likewise."""
    response = await api.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = {}
    for told in response.json()["choices"]:
        message: dict[str, Any] = {}
        calls = told["message"].pop("tool_calls", None)
        add(message, told["message"])
        if calls is not None:
            message["tool_calls"] = [{"type": call["type"], "function": call["function"]} for call in calls]
        choices[told["index"]] = {
            "message": message,
            "entries": told["logprobs"]["content"],
            "token_ids": told["token_ids"],
            "finish_reason": told["finish_reason"],
            "stop_reason": told.get("stop_reason"),
        }
    return choices


def check(choice: dict[str, Any]) -> None:
    """What an answer that ended by itself holds is valid."""
    message = choice["message"]
    if choice["finish_reason"] == "tool_calls":
        for call in message["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    elif choice["finish_reason"] == "stop" and choice["stop_reason"] is None and message.get("content", "")[:1] == "{":
        jsonschema.validate(json.loads(message["content"]), ANSWER)


@pytest.mark.parametrize("name", MIXTURES)
async def test_streamed_and_whole_choices_agree(live: Api, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))
    for seed in (1, 2):
        body = {"model": "babbler", "messages": ASK, "seed": seed, "max_tokens": 120, **MIXTURES[name]}
        told = await whole(live, body)
        assert len(told) == 3
        for choice in told.values():
            check(choice)
        parts = await streamed(live, body)
        # a message that says nothing says it in two ways
        for choice in (*told.values(), *parts.values()):
            choice["message"] = {key: value for key, value in choice["message"].items() if value}
        assert parts == told
