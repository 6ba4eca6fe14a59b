"""Messages of a chat request: text, tool calls and their results, and reasoning that clients send
back."""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import SHOWN, Body, ignored_schemas, refusal, unfit
from serve_app.api.bodies.past_calls import arguments_of, as_object

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
MAX_CALLS = 1024
MAX_NAME = 256
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "refusal")
"""Types of text parts. The assistant's refusals have their text in field `refusal`."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def check_parts(value: object) -> object:
    """Raise an error if all messages together have too many parts. Checked before each part is."""
    if isinstance(value, list) and len(value) <= MAX_MESSAGES:
        contents = (message.get("content") for message in value if isinstance(message, dict))
        if sum(len(content) for content in contents if isinstance(content, list)) > MAX_CONTENT_PARTS:
            raise refusal(f"may contain at most {MAX_CONTENT_PARTS} parts in all")
    return value


def check_text(value: object, kinds: Collection[str] = TEXTS, *, replaces: bool = False) -> str | None:
    """Return a text, or the text of a list of parts, joined by newlines.

    Raises an error for parts that are not of these kinds; with `replaces`, a note replaces them.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal("must be a string or a list of text parts")
    return "\n".join(_part_text(i, part, kinds, replaces) for i, part in enumerate(value))


def _part_text(i: int, part: object, kinds: Collection[str], replaces: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        if not replaces:
            raise refusal(f"part {i}: the model reads text only, not {kind[:SHOWN]!r}")
        return f"[{kind[:SHOWN]}: left out, as this model reads text only]"
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part, dict) or not isinstance(kind, str) or not isinstance(part.get(field), str):
        raise refusal(f'part {i} must be {{"type": "{kind or next(iter(kinds))}", "{field}": "..."}}')
    for name in part.keys() - {"type", field, *ignored.CONTENT_PART}:
        if part[name] is not None:
            raise refusal(f"part {i}: {name[:SHOWN]!r} is not a field of this server")
    text: str = part[field]
    return text


def text_schema(kinds: Collection[str] = TEXTS, *, replaces: bool = False) -> WithJsonSchema:
    """Return the JSON schema of values that `check_text` accepts."""
    choices = [_part_schema([kind for kind in kinds if kind != "refusal"], "text")]
    if "refusal" in kinds:
        choices.append(_part_schema(["refusal"], "refusal"))
    if replaces:
        choices.append({"type": "object", "properties": {"type": {"type": "string", "not": {"enum": [*kinds]}}}})
        choices[-1]["required"] = ["type"]
    parts = {"type": "array", "items": {"anyOf": choices}, "maxItems": MAX_CONTENT_PARTS}
    return WithJsonSchema({"anyOf": [{"type": "string"}, parts, {"type": "null"}]})


def _part_schema(kinds: Collection[str], field: str) -> dict[str, Any]:
    fields = {**ignored_schemas(ignored.CONTENT_PART), "type": {"enum": [*kinds]}, field: {"type": "string"}}
    required = ["type", field]
    others = {"additionalProperties": {"type": "null"}}
    return {"type": "object", "properties": fields, "required": required, **others}


ARGUMENTS = WithJsonSchema(
    {"type": ["string", "object", "null"], "description": "An object, or its JSON text, which may be incomplete."}
)


def check_arguments(value: object) -> dict[str, Any]:
    """Return a call's arguments, sent as an object or as JSON text, which may be incomplete."""
    if isinstance(value, str):
        return arguments_of(value)
    if not isinstance(value, dict):
        raise refusal("must be the text of a JSON object")
    try:
        return as_object(value)
    except ValueError:
        raise refusal("contains a number with too many digits") from None


class FunctionCall(Body):
    """The `function` of a call."""

    ignores = ignored.FUNCTION_CALL

    name: Name
    arguments: Annotated[Any, AfterValidator(check_arguments), ARGUMENTS] = Field(default_factory=dict)


class ToolCall(Body):
    """One of an assistant message's `tool_calls`."""

    ignores = ignored.TOOL_CALL

    id: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    type: Literal["function"] = "function"
    function: FunctionCall


def _check_content(value: object, info: ValidationInfo) -> str | None:
    return check_text(value, replaces=info.data.get("role") == "tool")


class Message(Body):
    """One chat message."""

    ignores = ignored.MESSAGE

    role: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
    """Roles other than the usual ones must be known to the chat template."""
    content: Annotated[Any, AfterValidator(_check_content), text_schema(replaces=True)] = None
    refusal: str | None = None
    """Also text of the assistant."""
    name: Annotated[str | None, Field(max_length=512)] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_CALLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
            if getattr(self, name) and self.role != "assistant":
                raise unfit(name, "is only allowed in messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise unfit("tool_call_id", "is required in role `tool`, and not allowed in other roles")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise unfit("content", "is required")
        return self

    @property
    def text(self) -> str:
        """The message's text."""
        return "\n".join(filter(None, (self.content, self.refusal)))

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates. `developer` becomes `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in self.tool_calls
            ]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        message.update({name: value for name, value in others.items() if value is not None})
        return message
