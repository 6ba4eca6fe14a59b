"""Tools over a real server: OpenAI's client, the default model as `deploy/config.yaml` serves it, a replica killed."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import Server

ASK: list[Any] = [{"role": "user", "content": "Write a note about the weather in Rome and keep it."}]
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1000, "maxLength": 1200}, "stars": {"enum": [1, 2, 3]}},
    "required": ["text", "stars"],
    "additionalProperties": False,
}
KEEP: Any = {"type": "function", "function": {"name": "keep", "description": "Keeps a note", "parameters": NOTE}}


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


async def stream(
    client: openai.AsyncOpenAI, body: dict[str, Any], strike: Callable[[], None] | None
) -> list[str | None]:
    """[name, arguments, finish reason] of a streamed call; `strike` comes once, in the middle of the arguments."""
    name: str | None = None
    reason: str | None = None
    arguments = ""
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                name = name or call.function.name
                arguments += call.function.arguments or ""
            reason = choice.finish_reason or reason
        if strike is not None and len(arguments) > 40:
            strike()
            strike = None
    assert strike is None
    return [name, arguments, reason]


@pytest.mark.cluster
@pytest.mark.slow
async def test_a_call_comes_whole_though_its_replica_is_killed(start: Callable[..., Server]) -> None:
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
        body: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct",
            "messages": ASK,
            "tools": [KEEP],
            "tool_choice": {"type": "function", "function": {"name": "keep"}},
            "parallel_tool_calls": False,
            "seed": 5,
        }
        expected = await stream(client, body, None)
        assert len(json.loads(expected[1] or "")["text"]) >= 1000
        assert await stream(client, body, lambda: _kill_the_busy(server)) == expected
        assert expected[::2] == ["keep", "tool_calls"]


def _kill_the_busy(server: Server) -> None:
    replicas = httpx.get(f"{server.url}/debug/replicas", timeout=30).json()
    [busy] = [replica for replica in replicas if replica["in_flight"]]
    os.kill(busy["pid"], signal.SIGKILL)
