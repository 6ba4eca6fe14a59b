"""Translates requests of other APIs to chat requests.

So template, tools, grammar and limits have one implementation. An endpoint adds a body with its
`chat_fields`, and a wire format for the answer.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from serve_app.api.bodies.schemas import ChatBody, SharedBody, validate
from serve_app.errors import InvalidRequestError
from serve_app.text.tokenizer import Tokenizer


class TranslatedBody(SharedBody):
    """A body that is translated to a chat request. Shared fields have the same meaning in both."""

    tools: Any = None
    """A list; None replaces a tool that the prompt leaves out."""

    chat_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """Patterns of chat's field names, and the names of these fields in this body."""

    @abstractmethod
    def chat_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the chat request's fields besides the shared ones."""

    def to_chat(self, tokenizer: Tokenizer) -> ChatBody:
        """Return the chat request. Raises `InvalidRequestError`."""
        shared = {name: getattr(self, name) for name in SharedBody.model_fields}
        return validate(ChatBody, self.chat_fields(tokenizer)).model_copy(update=shared)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Return a context in which errors name this body's fields instead of chat's."""
        try:
            yield
        except InvalidRequestError as error:
            message = re.sub("`([^`]+)`", lambda found: f"`{self.own_name(found[1])}`", error.message)
            param = None if error.param is None else self.own_name(error.param)
            raise type(error)(message, param=param, code=error.code) from None

    def own_name(self, name: str) -> str:
        """Return this body's name of a field of the chat request."""
        indices = [i for i, tool in enumerate(self.tools or ()) if tool is not None]
        name = re.sub(r"^tools\[(\d+)\]", lambda found: f"tools[{indices[int(found[1])]}]", name)
        for pattern, replacement in self.chat_names:
            name = re.sub(pattern, replacement, name)
        return name


class Conversation:
    """Builds a list of chat messages from single items.

    All items of one turn of the assistant become one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """Add a message's text.

        Leading system messages are joined, because chat templates accept only one.
        """
        if role == "assistant":
            self._join("content", text)
        elif role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Add reasoning of the assistant."""
        self._join("reasoning_content", text)

    def call(self, name: str, arguments: dict[str, Any], call_id: str) -> None:
        """Add a tool call of the assistant."""
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "function": function})

    def answer(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def ends_with_text(self) -> bool:
        """Whether the last message is a text of the assistant, which can be continued.

        Removes the last message if it is an empty one of the assistant.
        """
        last = self.messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            return False
        if not last.get("content") and not last.get("reasoning_content") and len(self.messages) > 1:
            del self.messages[-1]
        return bool(last.get("content"))

    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _join(self, field: str, text: str) -> None:
        turn = self._turn()
        turn[field] = f"{turn[field]}\n{text}" if turn.get(field) else text
