"""Packages that many programs use in front of a server like this one, unmodified, over a real
engine."""

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.api import client_programs
from tests.api.client_programs import Trip, Weather
from tests.api.conftest import Api
from tests.text.formats import tokenizer_of

INSTRUCTOR = json.loads(Path(__file__).with_name("instructor_bodies.json").read_text())["bodies"]


async def run(program: str, package: str, live: Api, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a program of `client_programs` prints."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install -c constraints.txt -e '.[clients]')")
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))
    command = (client_programs.__file__, program, f"{str(live.http.base_url).rstrip('/')}/v1", "babbler")
    # Neither package shall ask its own servers for anything.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={**os.environ, **quiet}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


def check(told: dict[str, Any]) -> None:
    Weather.model_validate(told["call"])
    assert told["streamed"] == told["call"]
    assert told["structured"]
    for trip in told["structured"]:
        Trip.model_validate(trip)


async def test_langchain(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    told = await run("langchain", "langchain_openai", live, monkeypatch)
    check(told)
    plain, streamed = told["tokens"]
    assert plain["output_tokens"] == streamed["output_tokens"] > 5
    assert told["after"] in ("length", "stop", "tool_calls")


@pytest.mark.slow
async def test_litellm(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow to import."""
    told = await run("litellm", "litellm", live, monkeypatch)
    check(told)
    assert told["after"] == "tool_calls"


@pytest.mark.parametrize("mode", list(INSTRUCTOR))
async def test_instructors_requests(live: Api, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """As instructor sends them, which goes with an older `openai` than ours; they ask for
    `Weather`."""
    monkeypatch.setattr(live.service, "tokenizer", tokenizer_of("hermes"))
    answer = await live.http.post("/v1/chat/completions", json=INSTRUCTOR[mode])
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    if mode == "JSON":  # any JSON object
        assert choice["message"]["content"].startswith("{")
    elif mode == "TOOLS":
        Weather.model_validate_json(choice["message"]["tool_calls"][0]["function"]["arguments"])
    else:
        Weather.model_validate_json(choice["message"]["content"])
