"""An answer as a sequence of items that start, grow and end: texts, reasoning, tool calls."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from serve_app.api.endpoint import Choice
from serve_app.api.generation import Usage
from serve_app.api.sse import PING
from serve_app.core.results import FinishReason
from serve_app.errors import RequestError
from serve_app.text.parts import Kind, Part
from serve_app.text.stream import TextPiece, TokenText


class ItemWire(ABC):
    """Base class for wires of item-based APIs.

    The whole answer equals the content of its events.
    """

    def __init__(self) -> None:
        self._kind: Kind | None = None
        """Kind of the open item."""
        self._texts: list[str] = []
        """Texts of the open item so far."""
        self.begun = False
        self._num_items = 0
        self.num_calls = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None

    @abstractmethod
    def begin(self) -> list[bytes]:
        """Return the events before the first item."""

    @abstractmethod
    def open_item(self, part: Part) -> list[bytes]:
        """Return the events that start an item of `part`'s kind.

        The part of a call has the tool's name.
        """

    @abstractmethod
    def grow(self, part: Part) -> bytes:
        """Return the event for more text of the open item."""

    @abstractmethod
    def close_item(self, kind: Kind, text: str, *, cut: bool) -> list[bytes]:
        """Return the events that end the open item. `text` is its whole text.

        cut: the answer reached its length limit.
        """

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the events after the last item."""

    @abstractmethod
    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the events that end a failed stream, instead of `end`."""

    @abstractmethod
    def answer(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer after all parts were read."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at its length limit."""
        return self.finish_reason == FinishReason.LENGTH

    def start(self, index: int) -> bytes:
        """Return nothing: `chunk` sends the first events, so that events are numbered in order."""
        return b""

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """Return the events for a piece, after `begin`'s if it is the first."""
        begin = [] if self.begun else self.begin()
        self.begun = True
        return b"".join(begin + self._read(piece.parts, piece.finish_reason, piece.stop_string))

    def ping(self) -> bytes:
        """Return the keep-alive: a comment."""
        return PING

    def token(self, index: int, token: TokenText) -> None:
        """Return nothing: these answers have no log-probabilities."""
        return

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the non-streamed answer."""
        (choice,) = choices
        self._read(choice.parts, choice.finish_reason, choice.stop_string)
        return self.answer(usage)

    def _read(self, parts: Sequence[Part], finish_reason: str | None, stop_string: str | None) -> list[bytes]:
        events: list[bytes] = []
        for part in parts:
            events += self._take(part)
        if finish_reason is not None:
            self.finish_reason, self.stop_string = finish_reason, stop_string
            if not self._num_items:
                events += self._open(Part(Kind.CONTENT, ""))
            events += self._close(cut=self.is_cut)
        return events

    def _take(self, part: Part) -> list[bytes]:
        opens = part.kind is Kind.CALL or part.kind not in (Kind.ARGUMENTS, self._kind)
        events = self._open(part) if opens else []
        if part.kind is not Kind.CALL:
            self._texts.append(part.text)
            events.append(self.grow(part))
        return events

    def _open(self, part: Part) -> list[bytes]:
        events = self._close(cut=False)
        self._kind, self._texts = part.kind, []
        self._num_items += 1
        self.num_calls += part.kind is Kind.CALL
        return events + self.open_item(part)

    def _close(self, *, cut: bool) -> list[bytes]:
        if self._kind is None:
            return []
        kind, self._kind = self._kind, None
        return self.close_item(kind, "".join(self._texts), cut=cut)
