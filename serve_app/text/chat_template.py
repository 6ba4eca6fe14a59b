"""Messages to the prompt a chat model was trained on. The template is the model's own, never the request's.

transformers renders it in jinja2's immutable sandbox. What the template refuses is the client's error, in the
template's own words. Control tokens that a client writes into a message are text, not control: nobody can end a
message or begin a system message from inside one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from serve_app.errors import InvalidRequestError

_MAX_MESSAGE = 500


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[str], list[int]],
    control_tokens: Sequence[str],
    messages: Sequence[dict[str, Any]],
) -> list[int]:
    """Prompt ids up to where the assistant's answer begins. `encode` takes a text that may hold control tokens.

    Each message is {"role": str, "content": str, ...}. Raises `InvalidRequestError` when the model has no chat template
    or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
    written = [value for message in messages for value in message.values()]
    forged = any(token in value for value in written for token in control_tokens)
    try:
        if not forged:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return encode(text)
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
        )
        return ids
    except jinja2.TemplateError as error:
        said = (error.message or type(error).__name__)[:_MAX_MESSAGE]
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {said}", param="messages"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise InvalidRequestError("the model's chat template cannot render these messages", param="messages") from error
