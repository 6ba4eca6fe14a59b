"""Every field of the request types of OpenAI's package: honoured, ignored, or refused by name. The
docs show the table.

The package is pinned, so that a new version's fields are decided on when it comes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams
from openai.types.shared_params import FunctionDefinition as FunctionParams

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import Body
from serve_app.api.bodies.messages import Message, ToolCall
from serve_app.api.bodies.responses import ResponsesBody
from serve_app.api.bodies.schemas import ChatBody, CompletionBody, StreamOptions
from serve_app.api.bodies.tools import FunctionDefinition, Tool
from serve_app.api.wires.embeddings import EmbeddingsBody

BODIES: dict[str, tuple[Any, type[Body]]] = {
    "chat completions": (ChatParams, ChatBody),
    "completions": (CompletionParams, CompletionBody),
    "responses": (ResponseParams, ResponsesBody),
    "embeddings": (EmbeddingCreateParams, EmbeddingsBody),
}
DOCS = Path(__file__).parents[2] / "docs" / "fields.md"
VERDICTS = ("honoured", "ignored", "ignored at one value", "refused")


def fields_of(params: Any) -> list[str]:
    """Of a typed dict and those that it extends."""
    return sorted(params.__required_keys__ | params.__optional_keys__)


def declared(body: type[Body]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


def known(body: type[Body]) -> set[str]:
    return declared(body) | set(body.ignores)


def verdict(name: str, body: type[Body]) -> tuple[str, str]:
    """What becomes of the field, and how the docs show it."""
    shown = f"`{name}`"
    if name in declared(body):
        return "honoured", shown
    values = body.ignores[name]
    if values is ignored.ANYTHING:
        return "ignored", shown
    if not values:
        return "refused", shown
    return "ignored at one value", f"`{name}: {' or '.join(map(json.dumps, values))}`"


def table() -> str:
    cells: Mapping[str, list[str]] = {row: [] for row in VERDICTS}
    for params, body in BODIES.values():
        found: dict[str, list[str]] = {row: [] for row in VERDICTS}
        for name in fields_of(params):
            row, shown = verdict(name, body)
            found[row].append(shown)
        for row in VERDICTS:
            cells[row].append(", ".join(found[row]))
    lines = [f"| | {' | '.join(BODIES)} |", "|---" * (1 + len(BODIES)) + "|"]
    return "\n".join([*lines, *(f"| {row} | {' | '.join(cells[row])} |" for row in VERDICTS)]) + "\n"


@pytest.mark.parametrize(("params", "body"), BODIES.values(), ids=list(BODIES))
def test_every_field_of_openais_requests_is_decided_on(params: Any, body: type[Body]) -> None:
    assert len(fields_of(params)) >= 5
    assert set(fields_of(params)) - known(body) == set()


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (ChatCompletionSystemMessageParam, known(Message)),
        (ChatCompletionDeveloperMessageParam, known(Message)),
        (ChatCompletionUserMessageParam, known(Message)),
        (ChatCompletionAssistantMessageParam, known(Message)),
        (ChatCompletionToolMessageParam, known(Message)),
        (ChatCompletionContentPartTextParam, {"type", "text", *ignored.CONTENT_PART}),
        (ChatCompletionMessageFunctionToolCallParam, known(ToolCall)),
        (ChatCompletionFunctionToolParam, known(Tool)),
        (FunctionParams, known(FunctionDefinition)),
        (ChatCompletionStreamOptionsParam, known(StreamOptions)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_and_every_field_of_their_parts(params: Any, names: set[str]) -> None:
    assert set(fields_of(params)) - names == set()


def test_the_docs_show_what_becomes_of_each() -> None:
    assert table() in DOCS.read_text(), table()
