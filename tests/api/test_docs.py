"""The examples of docs/api.md, as they stand there, against a running server with the model that
they name."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve_app.model.paged_model import PagedModel
from tests.api.conftest import Api, running
from tests.text.formats import tokenizer_of

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def examples() -> dict[str, list[str]]:
    """Python code by section, in the page's order."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    code = {title: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for title, text in sections}
    return {title: blocks for title, blocks in code.items() if blocks}


async def run(server: Api, code: str, known: dict[str, Any]) -> None:
    """As a reader's program that begins with the examples before it."""
    [model] = set(re.findall(r'model="([^"]+)"', code))
    server.service.name = model
    address = str(server.http.base_url).rstrip("/")
    await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8000", address), known)


@pytest.mark.wide
async def test_the_examples_run(default_model: PagedModel, capsys: pytest.CaptureFixture[str]) -> None:
    sections = examples()
    assert list(sections) == [
        "Streaming",
        "Constrained output",
        "Tools",
        "Reasoning",
        "Responses",
        "Messages",
        "Embeddings",
    ]
    known: dict[str, Any] = {}
    told: dict[str, list[str]] = {title: [] for title in sections}
    async with running(default_model, tokenizer_of("hermes")) as server:
        for title, blocks in sections.items():
            # The default model's own template knows no reasoning.
            server.service.tokenizer = tokenizer_of("qwen3_5_think" if title == "Reasoning" else "hermes")
            for code in blocks:
                await run(server, code, known)
                told[title].append(capsys.readouterr().out)
            if title == "Tools":
                [call, *_] = known["answer"].choices[0].message.tool_calls
                jsonschema.validate(json.loads(call.function.arguments), known["tools"][0]["function"]["parameters"])
            if title == "Reasoning":
                assert known["answer"].usage.completion_tokens_details.reasoning_tokens >= 24
        for client in (known["client"], known["claude"]):
            client.close()
    for title in ("Streaming", "Responses"):
        assert "Paris" in told[title][0]
    assert told["Messages"][0].strip()
    assert len(json.loads(told["Embeddings"][0])) == 256
    fruit, odds = told["Constrained output"]
    assert "fruit=" in fruit
    assert [line.split()[0] for line in odds.splitlines()] == ["yes", "no"]
