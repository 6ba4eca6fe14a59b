"""Counts the reasoning tokens of an answer.

It reads token by token, so the count does not depend on how deltas are cut.
"""

from serve_app.text.message_parser import MOST_SPACE
from serve_app.text.tool_arguments import Until
from serve_app.text.tool_format import Thinking


class ReasoningTokens:
    """Counts the tokens of a reasoning, including its marks."""

    def __init__(self, thinking: Thinking) -> None:
        self._open = thinking.form.open
        self._close = Until(thinking.form.close)
        self._inside: bool | None = True if thinking.begun else None
        """None until it is known whether the answer starts with a reasoning."""
        self._head = ""
        self._num_read = 0
        self.count = 0

    def read(self, text: str) -> None:
        """Count the next token, given the text that it completes."""
        if self._inside is False:
            return
        self._num_read += 1
        if self._inside is None:
            self._head += text
            solid = self._head.lstrip()
            text = solid.removeprefix(self._open)
            if solid.startswith(self._open):
                self._inside = True
            elif not self._open.startswith(solid) or len(self._head) - len(solid) > MOST_SPACE:
                self._inside = False
        if self._inside:
            self.count = self._num_read
            self._inside = self._close.feed(text)[1] is None
