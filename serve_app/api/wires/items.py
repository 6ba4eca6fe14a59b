"""An answer of one choice as items that begin, grow and end, one after another: texts, reasonings, calls of tools."""

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
    """What the wires of such endpoints share. The whole answer is what its events would have told."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        """The kind of the open item."""
        self._texts: list[str] = []
        """What the open item has gained."""
        self.begun = False
        self._num_items = 0
        self.num_calls = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None

    @abstractmethod
    def begin(self) -> list[bytes]:
        """The events before the first item."""

    @abstractmethod
    def open_item(self, part: Part) -> list[bytes]:
        """The events that begin an item, of the kind of `part`; of a call, `part` holds the name."""

    @abstractmethod
    def grow(self, part: Part) -> bytes:
        """The event for what the open item gains."""

    @abstractmethod
    def close_item(self, kind: Kind, text: str, *, cut: bool) -> list[bytes]:
        """The events that end the open item; `text` is all of it. cut: there was no room for the rest."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The events after the last item."""

    @abstractmethod
    def error(self, error: RequestError, request_id: str) -> bytes:
        """The events that end the stream in their place if it fails."""

    @abstractmethod
    def answer(self, usage: Usage) -> dict[str, Any]:
        """The whole answer, once all of it was read."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended for want of room."""
        return self.finish_reason == FinishReason.LENGTH

    def start(self, index: int) -> bytes:
        """Nothing: `chunk` begins, so that events may be numbered as they are made."""
        return b""

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """The events for what the answer gained, after those that begin it."""
        begin = [] if self.begun else self.begin()
        self.begun = True
        return b"".join(begin + self._read(piece.parts, piece.finish_reason, piece.stop_string))

    def ping(self) -> bytes:
        """A comment."""
        return PING

    def token(self, index: int, token: TokenText) -> None:
        """No log-probabilities here."""
        return

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
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
