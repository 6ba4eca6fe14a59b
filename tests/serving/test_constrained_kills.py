"""Constrained answers over three real replicas, of which the busy one is killed at random
places."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import openai
import pytest

from tests.cli.conftest import write_tiny_model
from tests.serving.conftest import Server, wait_for
from tests.serving.test_tools import ASK, kill_the_busy, num_ready

MODEL = "tiny"
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1500, "maxLength": 1700}, "stars": {"enum": [1, 2, 3]}},
    "required": ["text", "stars"],
    "additionalProperties": False,
}
CALL_BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": ASK,
    "tools": [{"type": "function", "function": {"name": "keep", "parameters": NOTE}}],
    "tool_choice": {"type": "function", "function": {"name": "keep"}},
    "parallel_tool_calls": False,
    "seed": 5,
}
ANSWER_BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": ASK,
    "response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}},
    "n": 2,
    "logprobs": True,
    "seed": 6,
}


async def stream(
    client: openai.AsyncOpenAI, body: dict[str, Any], strike: Callable[[], object] | None = None, at: int = 0
) -> list[Any]:
    """[text, name and arguments of the call, log-probabilities, finish reason] of each choice of a
    stream.

    `strike` comes once, as soon as the first choice has more than `at` characters of text or
    arguments.
    """
    told: list[list[Any]] = [["", "", "", [], None] for _ in range(body.get("n", 1))]
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            mine = told[choice.index]
            mine[0] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                mine[1] += call.function.name or ""
                mine[2] += call.function.arguments or ""
            mine[3] += [] if choice.logprobs is None else [entry.logprob for entry in choice.logprobs.content or ()]
            mine[4] = choice.finish_reason or mine[4]
        if strike is not None and len(told[0][0] + told[0][2]) > at:
            strike()
            strike = None
    assert strike is None
    return told


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_constrained_answers_stay_the_same_though_their_replicas_are_killed(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """At ten random places, also inside the string of a call's arguments."""
    write_tiny_model(tmp_path / MODEL, more_tokens="\n")  # which Hermes' form of calls holds
    args = {
        "model": str(tmp_path / MODEL),
        "served_model_name": MODEL,
        "device": "cpu",
        "num_replicas": 3,
        "engine": {"kv_cache_gib": 0.05, "max_num_seqs": 4, "num_threads": 1},
        "ingress": {"tools": "hermes", "failover_wait_s": 120.0},
    }
    server = start(args)
    server.wait_ready()
    async with server.client() as client:
        expected = {"call": await stream(client, CALL_BODY), "answer": await stream(client, ANSWER_BODY)}
        [[_, name, arguments, _, reason]] = expected["call"]
        assert (name, reason) == ("keep", "tool_calls")
        for text in (arguments, *(choice[0] for choice in expected["answer"])):
            jsonschema.validate(json.loads(text), NOTE)
        places, struck = Random(17), list[int]()
        for turn, kind in enumerate(("call", "answer") * 5):
            body = CALL_BODY if kind == "call" else ANSWER_BODY
            at = places.randrange(len(arguments if kind == "call" else expected[kind][0][0]) // 2)
            # an answer may be over before it is known which replica to strike
            while len(struck) <= turn:
                wait_for(lambda: num_ready(server) > 1, "a second replica is there", timeout_s=120)
                told = await stream(client, body, lambda: struck.extend(kill_the_busy(server)), at)
                assert told == expected[kind], (kind, at)
