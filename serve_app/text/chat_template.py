"""Messages to the prompt text a chat model was trained on. The template is the model's own, never the request's.

transformers renders it in jinja2's immutable sandbox. What the template refuses is the client's error, in the
template's own words.
"""

from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from serve_app.errors import InvalidRequestError

_MAX_MESSAGE = 500


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> str:
    """The prompt text up to where the assistant's answer begins.

    Each message is {"role": str, "content": str, ...}. Raises `InvalidRequestError` when the model has no chat template
    or its template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        said = (error.message or type(error).__name__)[:_MAX_MESSAGE]
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {said}", param="messages"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise InvalidRequestError("the model's chat template cannot render these messages", param="messages") from error
    return text
