"""Requests of other APIs in chat's words, so that all that follows is the same code: template,
tools, grammar, limits.

An endpoint adds its body, which says what it means as a chat request, and its wire.
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
    """A body that means a chat request. Shared fields mean there what they mean here."""

    tools: Any = None
    """In a list; None in the place of one that the model is not told of."""

    chat_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """Patterns of the names of chat's fields, and what stands here in their place."""

    @abstractmethod
    def chat_fields(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The other fields of the chat request."""

    def to_chat(self, tokenizer: Tokenizer) -> ChatBody:
        """The chat request. Raises `InvalidRequestError`."""
        shared = {name: getattr(self, name) for name in SharedBody.model_fields}
        return validate(ChatBody, self.chat_fields(tokenizer)).model_copy(update=shared)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors inside name the fields that the client sent, not chat's."""
        try:
            yield
        except InvalidRequestError as error:
            message = re.sub("`([^`]+)`", lambda found: f"`{self.own_name(found[1])}`", error.message)
            param = None if error.param is None else self.own_name(error.param)
            raise type(error)(message, param=param, code=error.code) from None

    def own_name(self, name: str) -> str:
        """What the field of this name in chat is here."""
        places = [place for place, tool in enumerate(self.tools or ()) if tool is not None]
        name = re.sub(r"^tools\[(\d+)\]", lambda found: f"tools[{places[int(found[1])]}]", name)
        for pattern, replacement in self.chat_names:
            name = re.sub(pattern, replacement, name)
        return name


class Conversation:
    """Chat's messages from items that come one by one. What the assistant did in one turn becomes
    one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """A message; what several system messages at the beginning say becomes one, as templates
        take no more."""
        if role == "assistant":
            self._join("content", text)
        elif role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """The assistant's reasoning."""
        self._join("reasoning_content", text)

    def call(self, name: str, arguments: dict[str, Any], call_id: str) -> None:
        """The assistant calls a tool."""
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "function": function})

    def answer(self, call_id: str, text: str) -> None:
        """What a tool answered."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def ends_with_text(self) -> bool:
        """Whether the assistant's last message is a text, which can be continued; an empty one is
        left out."""
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
