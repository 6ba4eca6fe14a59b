"""Bodies of POST /tokenize and /detokenize."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from serve_app.api.bodies.body import Body, unfit
from serve_app.api.bodies.fields import TemplateVariables, TokenId
from serve_app.api.bodies.messages import Message
from serve_app.api.bodies.schemas import ChatBody, ReasoningEffort, validate
from serve_app.api.bodies.tools import Tool, ToolChoice


def _checked_by_chat(kind: Any) -> BeforeValidator:
    """Return the annotation of a field that `to_chat` validates, with type `kind` in openapi."""
    return BeforeValidator(lambda value: value, json_schema_input_type=kind)


_CHAT_PROMPT = (
    "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


class TokenizeBody(Body):
    """POST /tokenize: a text, or messages and other fields that a chat passes to the chat
    template."""

    model: str | None = None
    """The served model, if given."""
    prompt: str | None = None
    """A text; give this or `messages`."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the tokenizer puts around a text. Default: true."""

    messages: Annotated[Any, _checked_by_chat(list[Message] | None)] = None
    """A conversation; with the fields below, the prompt is that of `/v1/chat/completions`."""
    tools: Annotated[Any, _checked_by_chat(list[Tool] | None)] = None
    """As in chat."""
    tool_choice: Annotated[Any, _checked_by_chat(ToolChoice)] = None
    """As in chat."""
    reasoning_effort: Annotated[Any, _checked_by_chat(ReasoningEffort | None)] = None
    """As in chat."""
    chat_template_kwargs: Annotated[Any, _checked_by_chat(TemplateVariables)] = None
    """As in chat."""
    add_generation_prompt: Annotated[Any, _checked_by_chat(bool | None)] = None
    """As in chat."""
    continue_final_message: Annotated[Any, _checked_by_chat(bool | None)] = None
    """As in chat."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise unfit("prompt", "or `messages` must be given, and not both")
        if self.messages is None:
            for name in _CHAT_PROMPT:
                if getattr(self, name) is not None:
                    raise unfit(name, "requires `messages`")
        return self

    def to_chat(self) -> ChatBody | None:
        """Return the chat request to tokenize; None for a text. Raises `InvalidRequestError`."""
        if self.messages is None:
            return None
        return validate(ChatBody, {name: getattr(self, name) for name in ("model", "messages", *_CHAT_PROMPT)})


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    """The served model, if given."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids; at most as many as the context."""
