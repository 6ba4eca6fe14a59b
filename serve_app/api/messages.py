"""The messages of a chat request: text, calls of tools and their results, reasoning that clients send back."""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from serve_app.api import ignored
from serve_app.api.body import SHOWN, Body, ignored_schemas, refusal, unfit

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_CALLS = 128
MAX_NAME = 256
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
_PART_FIELDS = {"type", "text", *ignored.CONTENT_PART}

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def check_parts(value: object) -> object:
    """Bound the parts of all messages together before any of them is looked at."""
    if isinstance(value, list) and len(value) <= MAX_MESSAGES:
        contents = (message.get("content") for message in value if isinstance(message, dict))
        if sum(len(content) for content in contents if isinstance(content, list)) > MAX_CONTENT_PARTS:
            raise refusal(f"may hold at most {MAX_CONTENT_PARTS} parts in all")
    return value


def check_text(value: object, kinds: Collection[str] = ("text",)) -> str | None:
    """A text, or the text of parts of these kinds, joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refusal("must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise refusal(f"part {i}: the model reads text only, not {kind[:SHOWN]!r}")
        if not isinstance(part, dict) or not isinstance(kind, str) or not isinstance(part.get("text"), str):
            raise refusal(f'part {i} must be {{"type": "{next(iter(kinds))}", "text": "..."}}')
        for name in part.keys() - _PART_FIELDS:
            if part[name] is not None:
                raise refusal(f"part {i}: {name[:SHOWN]!r} is not a field this server knows")
        texts.append(part["text"])
    return "\n".join(texts)


def text_schema(kinds: Collection[str] = ("text",), *, may_be_empty: bool = False) -> WithJsonSchema:
    """What `check_text` takes."""
    fields = {**ignored_schemas(ignored.CONTENT_PART), "type": {"enum": [*kinds]}, "text": {"type": "string"}}
    part = {
        "type": "object",
        "properties": fields,
        "required": ["type", "text"],
        "additionalProperties": {"type": "null"},
    }
    parts = {"type": "array", "items": part, "minItems": 0 if may_be_empty else 1, "maxItems": MAX_CONTENT_PARTS}
    return WithJsonSchema({"anyOf": [{"type": "string"}, parts, {"type": "null"}]})


ARGUMENTS = WithJsonSchema({"type": ["string", "object", "null"], "description": "An object, or its JSON text."})


def check_arguments(value: object) -> dict[str, Any]:
    """The object whose JSON text a client sends back."""
    try:
        arguments = json.loads(value) if isinstance(value, str) and value else {} if value in ("", None) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refusal("must be the text of a JSON object")
    return arguments


class FunctionCall(Body):
    """The `function` of a call."""

    name: Name
    arguments: Annotated[Any, AfterValidator(check_arguments), ARGUMENTS]


class ToolCall(Body):
    """One of an assistant message's `tool_calls`."""

    ignores = ignored.TOOL_CALL

    id: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One chat message."""

    ignores = ignored.MESSAGE

    role: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
    """Others than the usual ones are the chat template's."""
    content: Annotated[Any, AfterValidator(check_text), text_schema()] = None
    name: Annotated[str | None, Field(max_length=512)] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_CALLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of it."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, name) and self.role != "assistant":
                raise unfit(name, "belongs to messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise unfit("tool_call_id", "is required by the role `tool`, and by no other")
        if self.content is None and self.role != "assistant":
            raise unfit("content", "is required")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates expect; `developer` is the newer name of `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in self.tool_calls
            ]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        message.update({name: value for name, value in others.items() if value is not None})
        return message
