"""Messages to the prompt a chat model was trained on. The template is the model's own, never the request's.

transformers renders it in jinja2's immutable sandbox. What the template refuses is the client's error, in the
template's own words. Control tokens that a client writes into a message are text, not control: nobody can end a
message or begin a system message from inside one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import jinja2

from serve_app.errors import InvalidRequestError
from serve_app.text.hermes import as_text
from serve_app.text.tool_format import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_MESSAGE = 500
CANNOT_RENDER = (
    jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "date_string")


class Ending(Enum):
    """How a prompt ends, as arguments of transformers."""

    ANSWER = {"add_generation_prompt": True}
    """With the beginning of the assistant's answer."""
    MESSAGE = {"add_generation_prompt": False}
    """With the end of the last message."""
    CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
    """Inside the last message, which the answer continues."""


def without_tools(param: str) -> InvalidRequestError:
    """The error of a request whose `param` holds tools or calls for a model that knows none."""
    return InvalidRequestError(
        f"`{param}`: this model's chat template knows no tools, or none that this server can read "
        "(the operator may set `ingress.tools`)",
        param=param,
    )


def write_calls(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat | None
) -> list[dict[str, Any]]:
    """`messages` with calls and results as the template takes them.

    Raises `InvalidRequestError` where it takes none.
    """
    if form is None:
        raise without_tools("tools" if tools else "messages")
    if not form.in_template:
        return as_text(messages, tools)
    return [_with_text_arguments(message) for message in messages] if form.text_arguments else list(messages)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    encode: Callable[[str], list[int]],
    control_tokens: Sequence[str],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
    ending: Ending = Ending.ANSWER,
) -> list[int]:
    """Prompt ids up to where the assistant's answer begins. `encode` takes a text that may hold control tokens.

    Each message is {"role": str, "content": str, ...}; `variables` are the template's own. Raises `InvalidRequestError`
    when the model has no chat template or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
    given: dict[str, Any] = {**variables, "tools": list(tools) or None, **ending.value}
    keys, values = _texts([list(messages), given["tools"], dict(variables)])
    if any(token in key for key in keys for token in control_tokens):
        raise InvalidRequestError("a name in `tools` or in a call's arguments holds a control token", param="tools")
    forged = any(token in value for value in values for token in control_tokens)
    try:
        if not forged:
            return encode(tokenizer.apply_chat_template(list(messages), tokenize=False, **given))
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), return_dict=False, sanitize_control_tokens=True, **given
        )
        return ids
    except jinja2.TemplateError as error:
        said = (error.message or type(error).__name__)[:_MAX_MESSAGE]
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {said}", param="messages"
        ) from error
    except CANNOT_RENDER as error:
        raise InvalidRequestError("the model's chat template cannot render these messages", param="messages") from error


def takes_role(render: Callable[[Sequence[dict[str, Any]]], str], role: str) -> bool:
    """Whether the template writes messages of this role under its name, instead of dropping or renaming them."""
    text = "What is said."
    try:
        written = render([{"role": "user", "content": "?"}, {"role": role, "content": text}])
        usual = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])
    except CANNOT_RENDER:
        return False
    return text in written and written.count(role) > usual.count(role)


def _texts(data: Any) -> tuple[list[str], list[str]]:
    """(keys of objects, all other texts) at any depth."""
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
    """Which variables that a request may set this chat template knows."""
    return frozenset(name for name in _VARIABLES if re.search(rf"\b{name}\b", template or ""))
