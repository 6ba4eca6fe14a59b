"""Tools over a real server: OpenAI's client, the default model as `deploy/config.yaml` serves it, a
replica killed."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import Server, wait_for

ASK: list[Any] = [{"role": "user", "content": "Write a note about the weather in Rome and keep it."}]
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1000, "maxLength": 1200}, "stars": {"enum": [1, 2, 3]}},
    "required": ["text", "stars"],
    "additionalProperties": False,
}
KEEP: Any = {"name": "keep", "description": "Keeps a note", "parameters": NOTE}
SHARED: Any = {"model": "SmolLM2-135M-Instruct", "extra_body": {"seed": 5}}


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


Strike = Callable[[], None] | None
"""What comes once, in the middle of the arguments."""


async def chat(server: Server, strike: Strike) -> list[Any]:
    """[name, arguments, how it ended] of a streamed call."""
    name: str | None = None
    reason: str | None = None
    arguments = Arguments(strike)
    body: Any = {
        "tools": [{"type": "function", "function": KEEP}],
        "tool_choice": {"type": "function", "function": {"name": "keep"}},
        "parallel_tool_calls": False,
    }
    async with server.client() as client:
        chunks = await client.chat.completions.create(messages=ASK, stream=True, **SHARED, **body)
        async for choice in (choice async for chunk in chunks for choice in chunk.choices):
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                name = name or call.function.name
                arguments.add(call.function.arguments or "")
            reason = choice.finish_reason or reason
    return [name, arguments.whole(), reason]


async def responses(server: Server, strike: Strike) -> list[Any]:
    """The same over /v1/responses."""
    arguments = Arguments(strike)
    choice = {"type": "function", "name": "keep"}
    body: Any = {"tools": [{"type": "function", **KEEP}], "tool_choice": choice, "parallel_tool_calls": False}
    async with server.client() as client, client.responses.stream(input=ASK, **SHARED, **body) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                arguments.add(event.delta)
        response = await stream.get_final_response()
    [call] = response.output
    assert call.type == "function_call"
    assert call.arguments == arguments.whole()
    return [call.name, call.arguments, response.status]


async def messages(server: Server, strike: Strike) -> list[Any]:
    """The same over /v1/messages."""
    arguments = Arguments(strike)
    tool = {"name": "keep", "description": "Keeps a note", "input_schema": NOTE}
    choice = {"type": "tool", "name": "keep", "disable_parallel_tool_use": True}
    body: Any = {"messages": ASK, "max_tokens": 1500, "tools": [tool], "tool_choice": choice}
    async with (
        anthropic.AsyncAnthropic(api_key="none", base_url=server.url, max_retries=0, timeout=300) as client,
        client.messages.stream(**SHARED, **body) as stream,
    ):
        async for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                arguments.add(event.delta.partial_json)
        message = await stream.get_final_message()
    [block] = message.content
    assert block.type == "tool_use"
    assert block.input == json.loads(arguments.whole())
    return [block.name, arguments.whole(), message.stop_reason]


class Arguments:
    """Of a call, as they come."""

    def __init__(self, strike: Strike) -> None:
        self._text = ""
        self._strike = strike

    def add(self, text: str) -> None:
        self._text += text
        if self._strike is not None and len(self._text) > 40:
            self._strike()
            self._strike = None

    def whole(self) -> str:
        assert self._strike is None
        return self._text


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_calls_come_whole_though_their_replicas_are_killed(start: Callable[..., Server]) -> None:
    engine = {"kv_cache_gib": 0.2, "max_num_seqs": 4, "num_threads": 1}
    args = {"num_replicas": 2, "engine": engine, "ingress": {"tools": "hermes", "failover_wait_s": 120.0}}
    server = start(args)
    server.wait_ready()
    async with server.client() as client:
        tool = openai.pydantic_function_tool(Weather)
        answer = await client.chat.completions.parse(
            model="SmolLM2-135M-Instruct", messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert isinstance(call.function.parsed_arguments, Weather)
    struck: list[int] = []
    wires = ((chat, "tool_calls"), (responses, "completed"), (messages, "tool_use"))
    for turn, (wire, end) in enumerate(wires):
        expected = await wire(server, None)
        assert len(json.loads(expected[1])["text"]) >= 1000
        assert expected[::2] == ["keep", end]
        # an answer may be over before it is known which replica to strike
        while len(struck) <= turn:
            wait_for(lambda: num_ready(server) == 2, "two replicas", timeout_s=150)
            assert await wire(server, lambda: struck.extend(kill_the_busy(server))) == expected


def _replicas(server: Server) -> list[Any]:
    replicas: list[Any] = httpx.get(f"{server.url}/debug/replicas", timeout=30).json()
    return replicas


def num_ready(server: Server) -> int:
    return sum(replica["condition"] == "ok" and not replica["leaving"] for replica in _replicas(server))


def kill_the_busy(server: Server) -> list[int]:
    """Kill the replica that answers, unless it has answered already; the process's number."""
    busy = [replica["pid"] for replica in _replicas(server) if replica["in_flight"]]
    for pid in busy:
        os.kill(pid, signal.SIGKILL)
    return busy
