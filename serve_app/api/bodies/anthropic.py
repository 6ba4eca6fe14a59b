"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation to chat."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from serve_app.api.bodies import ignored
from serve_app.api.bodies.body import Body, Variant, unfit
from serve_app.api.bodies.fields import Stop
from serve_app.api.bodies.messages import MAX_MESSAGES, Name, check_parts, check_text, text_schema
from serve_app.api.bodies.template import knows_effort
from serve_app.api.bodies.tools import ToolName
from serve_app.api.bodies.translation import Conversation, TranslatedBody
from serve_app.core.sampling_params import SamplingParams
from serve_app.text.tokenizer import Tokenizer

_SAID_BY = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code puts in front of its system prompt.

It differs in every request, so no request would find the prefix of an earlier one in the cache.
"""


def _check_blocks(value: object) -> object:
    """Return the content, a text or blocks, as a list of blocks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    Block.check_types(value, "block")
    return value


class Block(Variant):
    """A content block of a message."""

    ignores = ignored.ANTHROPIC_BLOCK
    needs = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Annotated[Any, AfterValidator(lambda v: check_text(v, replaces=True)), text_schema(replaces=True)] = None


class AnthropicMessage(Body):
    """A message of `messages`."""

    ignores = ignored.ANTHROPIC_MESSAGE

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_check_blocks, json_schema_input_type=str | list[Block])]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for i, block in enumerate(self.content):
            if block.type not in _SAID_BY[self.role]:
                raise unfit(f"content[{i}]", f"has type {block.type!r}, which is not allowed in role {self.role!r}")
        return self

    def add_to(self, conversation: Conversation) -> None:
        """Add the message to the conversation.

        Texts between tool results become separate messages.
        """
        texts = [] if self.content else [""]
        for block in (*self.content, None):
            if block is not None and block.type == "text":
                texts.append(block.text or "")
                continue
            if texts:
                conversation.say(self.role, "\n".join(texts))
                texts = []
            match block:
                case Block(type="thinking"):
                    conversation.think(block.thinking or "")
                case Block(type="tool_use"):
                    conversation.call(block.name or "", block.input or {}, block.id or "")
                case Block(type="tool_result"):
                    conversation.answer(block.tool_use_id or "", block.content or "")


class AnthropicTool(Body):
    """One of `tools`."""

    ignores = ignored.ANTHROPIC_TOOL

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in chat's form."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


_OTHER_TYPE = {"not": {"enum": ["custom", None]}}
_SkippedTool = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "properties": {"type": _OTHER_TYPE}, "required": ["type"]})
]


def _check_tool_types(value: object) -> object:
    """Return the tools, with None instead of those that only Anthropic's servers have."""
    if not isinstance(value, list):
        return value
    return [None if isinstance(tool, dict) and tool.get("type") not in (None, "custom") else tool for tool in value]


class AnthropicToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise unfit("name", "is required with type `tool`, and not allowed with other types")
        return self

    def for_chat(self) -> Any:
        """Return the choice in chat's form."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Body):
    """`thinking`. With `adaptive` or without this field, the chat template decides."""

    ignores = ignored.THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None


class OutputFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """`output_config`."""

    ignores = ignored.ANTHROPIC_OUTPUT

    format: OutputFormat | None = None


class CountTokensBody(TranslatedBody):
    """POST /v1/messages/count_tokens."""

    ignores = ignored.ANTHROPIC
    chat_names = (
        (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
        (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
        (r"^response_format\.json_schema", "output_config.format"),
        ("^reasoning_effort", "thinking"),
        ("^continue_final_message", "messages"),
    )

    n: Literal[1] | None = None
    """Only 1 is supported."""
    messages: Annotated[
        list[AnthropicMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(check_parts),
    ]
    """The conversation so far."""
    system: Annotated[Any, AfterValidator(check_text), text_schema()] = None
    """System prompt."""
    tools: Annotated[
        list[AnthropicTool | None] | None,
        BeforeValidator(_check_tool_types, json_schema_input_type=list[AnthropicTool | _SkippedTool | None] | None),
    ] = None
    """Functions that the model may call. Tools built into Anthropic's API are skipped."""
    tool_choice: AnthropicToolChoice | None = None
    """`auto`, `any`, `tool` or `none`."""
    thinking: ThinkingConfig | None = None
    """Passed to the chat template as far as it supports it; `budget_tokens` applies to models that
    reason."""
    output_config: OutputConfig | None = None
    """`format`: a JSON schema for the answer."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        SamplingParams(**self.sampling_fields(), seed=self.seed)  # also where nothing is generated
        return self

    def chat_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the chat request's fields besides the shared ones."""
        conversation = Conversation()
        if system := _BILLING.sub("", self.system or ""):
            conversation.say("system", system)
        for message in self.messages:
            message.add_to(conversation)
        choice, thinking, output = self.tool_choice, self.thinking, self.output_config
        fields: dict[str, Any] = {
            "messages": conversation.messages,
            "continue_final_message": conversation.ends_with_text(),
        }
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools if tool is not None]
        if choice is not None:
            parallel = False if choice.disable_parallel_tool_use else None
            fields |= {"tool_choice": choice.for_chat(), "parallel_tool_calls": parallel}
        if thinking is not None and thinking.type != "adaptive" and knows_effort(tokenizer):
            fields["reasoning_effort"] = "none" if thinking.type == "disabled" else "medium"
        if thinking is not None and tokenizer.reasoning is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
        if output is not None and output.format is not None:
            schema = {"name": "", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    """May exceed the rest of the context, which then ends the answer."""
    stop_sequences: Stop = None
    """Stop strings."""

    def chat_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the chat request's fields besides the shared ones and `max_tokens`.

        `max_tokens` may exceed the context, which chat refuses.
        """
        return {**super().chat_fields(tokenizer), "stop": self.stop_sequences}
