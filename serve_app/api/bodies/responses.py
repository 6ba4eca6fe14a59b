"""Body of POST /v1/responses, and its translation to a chat request.

The API is stateless here: `input` contains the whole history.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import Body, Variant, refusal, unfit
from serve_app.api.bodies.fields import MaxTokens
from serve_app.api.bodies.messages import (
    ARGUMENTS,
    MAX_MESSAGES,
    Name,
    check_arguments,
    check_parts,
    check_text,
    text_schema,
)
from serve_app.api.bodies.schemas import ReasoningEffort
from serve_app.api.bodies.template import knows_effort
from serve_app.api.bodies.tools import MAX_TOOLS, FunctionDefinition
from serve_app.api.bodies.translation import Conversation, TranslatedBody
from serve_app.core.sampling_params import MAX_TOP_LOGPROBS
from serve_app.text.tokenizer import Tokenizer

_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_CONTENT_PARTS = (*_TEXT_PARTS, "reasoning_text")


def _check_input(value: object) -> object:
    """Return the input, a text or items, as a list of items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    InputItem.check_types(value, "item")
    return check_parts(value)


class InputItem(Variant):
    """An item of `input`."""

    ignores = ignored.RESPONSES_ITEM
    needs = {
        "message": ("role", "content"),
        "reasoning": (),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
    }

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[Any, AfterValidator(lambda v: check_text(v, _CONTENT_PARTS)), text_schema(_CONTENT_PARTS)] = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Annotated[Any, AfterValidator(lambda v: None if v is None else check_arguments(v)), ARGUMENTS] = None
    input: str | None = None
    output: Annotated[
        Any,
        AfterValidator(lambda v: check_text(v, _TEXT_PARTS, replaces=True)),
        text_schema(_TEXT_PARTS, replaces=True),
    ] = None

    def add_to(self, conversation: Conversation) -> None:
        """Add the item to the conversation."""
        match self.type:
            case "message":
                role = "system" if self.role == "developer" else self.role
                conversation.say(role or "", self.content)
            case "reasoning" if self.content:
                conversation.think(self.content)
            case "function_call":
                conversation.call(self.name or "", self.arguments, self.call_id or "")
            case "custom_tool_call":
                conversation.call(self.name or "", {"input": self.input}, self.call_id or "")
            case "function_call_output" | "custom_tool_call_output":
                conversation.answer(self.call_id or "", self.output)


class FunctionTool(FunctionDefinition):
    """One of `tools`."""

    ignores = ignored.RESPONSES_TOOL

    type: Literal["function"]


_Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
_SkippedTool = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "properties": {"type": {"not": {"const": "function"}}}})
]


def _check_tool_types(value: object) -> object:
    """Return the tools, with None instead of those that only OpenAI's servers have."""
    if not isinstance(value, list):
        return value
    return [None if isinstance(tool, dict) and tool.get("type") != "function" else tool for tool in value]


def _tool_choice(value: Any) -> Any:
    """Return the choice in chat's form, or raise an error."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_tool_choice(t) for t in tools]}}
    raise refusal(
        'must be "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )


_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED, "minItems": 1, "maxItems": MAX_TOOLS},
    },
    "required": ["type", "mode", "tools"],
}
_TOOL_CHOICE = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED, _ALLOWED]})


def _check_tool_choice(value: Any) -> Any:
    _tool_choice(value)
    return value


class TextFormat(Body):
    """`text.format`. The schema is always enforced, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, Field(max_length=64)] = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.schema_ is None) == (self.type == "json_schema"):
            raise unfit("schema", "is required with type `json_schema`, and not allowed with other types")
        return self


class TextConfig(Body):
    """`text`."""

    ignores = ignored.RESPONSES_TEXT

    format: TextFormat | None = None


class Reasoning(Body):
    """`reasoning`."""

    ignores = ignored.REASONING

    effort: ReasoningEffort | None = None


class ResponsesBody(TranslatedBody):
    """POST /v1/responses."""

    ignores = ignored.RESPONSES
    chat_names = (
        ("^messages", "input"),
        ("^max_tokens", "max_output_tokens"),
        (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
        (r"^tool_choice\.allowed_tools", "tool_choice"),
        (r"^response_format(\.json_schema)?", "text.format"),
        ("^reasoning_effort", "reasoning.effort"),
    )

    n: Literal[1] | None = None
    """Only 1 is supported."""
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_check_input, json_schema_input_type=str | _Items),
    ]
    """A user's message, or the conversation so far."""
    instructions: str | None = None
    """System prompt; joined with leading system messages."""
    max_output_tokens: MaxTokens = None
    """-1 is the rest of the context, which is the default."""
    tools: Annotated[
        list[FunctionTool | None] | None,
        BeforeValidator(_check_tool_types, json_schema_input_type=list[FunctionTool | _SkippedTool | None] | None),
    ] = None
    """Functions that the model may call. Tools that OpenAI's servers run are skipped."""
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice), _TOOL_CHOICE] = None
    """`none`, `auto`, `required`, a named function, or `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call. Default: true, or false with a named tool."""
    text: TextConfig | None = None
    """`format`: `text`, `json_object` or `json_schema`."""
    reasoning: Reasoning | None = None
    """`effort`; ignored where the chat template supports no effort."""
    include: list[str] | None = None
    """`message.output_text.logprobs` is supported; other values are ignored, since they belong to
    built-in tools or stored responses."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Alternatives per token of the texts, without reasoning and calls."""
    metadata: dict[str, str] | None = None
    """Returned in the answer."""

    @property
    def format(self) -> TextFormat:
        """The text's format; `text` by default."""
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def with_logprobs(self) -> bool:
        """Whether texts include log-probabilities of their tokens."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools in the model's prompt."""
        return [tool for tool in self.tools or () if tool is not None]

    def chat_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the chat request's fields besides the shared ones."""
        conversation = Conversation()
        if self.instructions:
            conversation.say("system", self.instructions)
        for item in self.input:
            item.add_to(conversation)
        effort = self.reasoning.effort if self.reasoning and knows_effort(tokenizer) else None
        schema = self.format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {
            "messages": conversation.messages,
            "max_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": tool} for tool in self.functions],
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": {"type": self.format.type, "json_schema": {"name": "", **schema} if schema else None},
            "reasoning_effort": effort,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
        }
