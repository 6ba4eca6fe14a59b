"""Renders messages to a prompt with the model's chat template. Requests cannot supply a template.

transformers renders it in jinja2's immutable sandbox. An error that the template raises becomes the
client's 400 with the template's message. Control tokens in a client's message are encoded as text,
so a message cannot end itself or start a system message.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import jinja2

from serve_app.errors import InvalidRequestError
from serve_app.text.control_tokens import Chat, split_forged
from serve_app.text.hermes import as_text
from serve_app.text.tool_format import UNREADABLE, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_MESSAGE = 500
CANNOT_RENDER = (
    jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "date_string")


class Ending(Enum):
    """The end of a prompt, as arguments of transformers."""

    ANSWER = {"add_generation_prompt": True}
    """At the start of the assistant's answer."""
    MESSAGE = {"add_generation_prompt": False}
    """After the last message."""
    CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
    """Inside the last message, which the answer continues."""


def without_tools(param: str) -> InvalidRequestError:
    """Return the error for a request with tools or calls in `param` if the model supports none."""
    return InvalidRequestError(
        f"`{param}`: this model's chat template has no tools in a form that this server supports "
        "(the operator can set `ingress.tools`)",
        param=param,
    )


def write_calls(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat | None
) -> list[dict[str, Any]]:
    """Convert calls and results in `messages` to the template's form.

    Raises `InvalidRequestError` if the template supports no tools.
    """
    if form is None:
        raise without_tools("tools" if tools else "messages")
    if not form.in_template:
        return as_text(messages, tools)
    if form.separator is None:
        messages = [single for message in messages for single in _single_calls(message)]
    return [_with_arguments(message, json.dumps) for message in messages] if form.text_arguments else list(messages)


def _single_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a message with several calls, for a template that writes one call per message."""
    calls = message.get("tool_calls", [])
    if len(calls) < 2:
        return [message]
    return [{**message, "tool_calls": calls[:1]}, *({**message, "content": "", "tool_calls": [c]} for c in calls[1:])]


def _with_arguments(message: dict[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `message` with `write` applied to the arguments of each call."""
    calls = [
        {**call, "function": {**call["function"], "arguments": write(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _without_control_keys(message: dict[str, Any], control_tokens: re.Pattern[str]) -> dict[str, Any]:
    """Convert arguments with a control token in a name to text, since marks work only in values."""

    def readable(arguments: Any) -> Any:
        keys, _ = _texts(arguments)
        forged = any(control_tokens.search(key) for key in keys)
        return {UNREADABLE: json.dumps(arguments, ensure_ascii=False)} if forged else arguments

    return _with_arguments(message, readable)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    encode: Callable[[Sequence[tuple[str, bool]]], list[int]],
    control_tokens: re.Pattern[str],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
    ending: Ending = Ending.ANSWER,
) -> list[int]:
    """Return the prompt's token ids.

    encode: takes the text in parts, (part, whether control tokens in it are text). messages:
    {"role": str, "content": str, ...}. variables: variables of the template.
    Raises `InvalidRequestError` if the model has no chat template, or the template refuses the
    messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
    given: dict[str, Any] = {**variables, "tools": list(tools) or None, **ending.value}
    for param, data in (("tools", given["tools"]), ("chat_template_kwargs", dict(variables))):
        if any(control_tokens.search(key) for key in _texts(data)[0]):
            raise InvalidRequestError(f"`{param}`: a field name contains a control token", param=param)
    messages = [_without_control_keys(message, control_tokens) for message in messages]
    _, values = _texts([messages, given["tools"], dict(variables)])

    def render(chat: Chat) -> str:
        text: str = tokenizer.apply_chat_template(list(chat.messages), tokenize=False, **chat.variables)
        return text

    try:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        template: str = tokenizer.get_chat_template(None, given["tools"])
        chat = Chat(template, messages, given, special)
        text = render(chat)
        if not any(control_tokens.search(value) for value in values):
            return encode([(text, False)])
        return encode(split_forged(text, chat, control_tokens, render))
    except jinja2.TemplateError as error:
        said = (error.message or type(error).__name__)[:_MAX_MESSAGE]
        raise InvalidRequestError(
            f"the model's chat template rejects these messages: {said}", param="messages"
        ) from error
    except CANNOT_RENDER as error:
        if ending is Ending.CONTINUED and "continue_final_message" in str(error):
            raise InvalidRequestError(
                "`continue_final_message`: the model's chat template does not render the last message unchanged",
                param="continue_final_message",
            ) from error
        raise InvalidRequestError("the model's chat template cannot render these messages", param="messages") from error


def takes_role(render: Callable[[Sequence[dict[str, Any]]], str], role: str) -> bool:
    """Whether the template writes messages of this role with the role's name.

    Other templates drop or rename such messages.
    """
    text = "What is said."
    try:
        written = render([{"role": "user", "content": "?"}, {"role": role, "content": text}])
        usual = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])
    except CANNOT_RENDER:
        return False
    return text in written and written.count(role) > usual.count(role)


def _texts(data: Any) -> tuple[list[str], list[str]]:
    """Return (keys of objects, all other texts) at any depth."""
    keys: list[str] = []
    values: list[str] = []
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            values.append(item)
        elif isinstance(item, dict):
            keys += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return keys, values


def template_variables(template: str | None) -> frozenset[str]:
    """Return the variables that a request may set and this chat template uses."""
    return frozenset(name for name in _VARIABLES if re.search(rf"\b{name}\b", template or ""))
