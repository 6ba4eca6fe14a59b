"""Finds the token that ends an answer: the chat template writes it after an assistant's message."""

from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix

from serve_app.text.chat_template import CANNOT_RENDER

Render = Callable[..., str]
"""Renders messages to text. Keywords are the template's."""
_ANSWER = "Fine."
_QUESTION, _REPLY = {"role": "user", "content": "Well?"}, {"role": "assistant", "content": _ANSWER}
# In some templates the token before the next question ends an answer.
_CHATS = ([_QUESTION, _REPLY], [_QUESTION, _REPLY, _QUESTION])


def find_turn_end(render: Render, control_tokens: Iterable[str], marks: Sequence[str]) -> str | None:
    """Return the control token after an answer and optional white space; None if there is none.

    Also None if answers contain control tokens (gpt-oss writes several messages in one), since the
    end of a part is not the end of the answer. marks: of a reasoning; they may be control tokens
    and do not count.
    """
    longest_first = sorted(control_tokens, key=len, reverse=True)
    opening = _try(render, [_QUESTION], add_generation_prompt=True)
    for messages in _CHATS:
        before, _, behind = _try(render, messages).partition(_ANSWER)
        own = before[len(commonprefix([opening, before])) :]
        for mark in marks:
            own = own.replace(mark, "")
        if any(token in own for token in longest_first):
            return None
        found = next((token for token in longest_first if behind.lstrip().startswith(token)), None)
        if found is not None:
            return found
    return None


def _try(render: Render, messages: Sequence[dict[str, str]], **how: bool) -> str:
    try:
        return render(messages, **how)
    except CANNOT_RENDER:  # the template does not support these messages
        return ""
