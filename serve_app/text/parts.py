"""The parts of an answer.

Emitted text has no white space at the borders of parts, and no stop strings.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.text.stop import StopMatcher


class Kind(StrEnum):
    """The kind of a part."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """Start of a call. The text is the tool's name."""
    ARGUMENTS = "arguments"
    """More JSON arguments of the newest call."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    call: number of the call in the message. at: where content starts in the answer's text, in
    characters.
    """

    kind: Kind
    text: str
    call: int = 0
    at: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """Position after the content in the answer's text, in characters."""
        return self.at + len(self.text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge adjacent parts of one kind. Each call stays separate."""
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        first = runs[-1][0] if runs else None
        if first is not None and part.kind is first.kind is not Kind.CALL and part.call == first.call:
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return [Part(first.kind, "".join(texts), first.call, first.at) for first, texts in runs]


class PlainText:
    """Parses an answer that has only content."""

    num_calls = 0
    in_call = False

    def __init__(self, stops: StopMatcher) -> None:
        self._stops = stops
        self._end = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stops.stopped

    def feed(self, text: str, *, looks: bool = True) -> list[Part]:
        """Add text and return the new parts. looks: search it for stop strings."""
        return self._emit(self._stops.feed(text) if looks else text)

    def finish(self) -> list[Part]:
        """End the text and return the rest, with text held back for a possible stop string."""
        return self._emit(self._stops.flush())

    def _emit(self, text: str) -> list[Part]:
        self._end += len(text)
        return [Part(Kind.CONTENT, text, 0, self._end - len(text))] if text else []


class TrimmedText:
    """The text of one kind of parts, up to a stop string.

    White space next to parts of other kinds is removed. Leading white space is emitted or dropped
    only when text follows, since a call may follow instead.
    """

    def __init__(self, stops: StopMatcher) -> None:
        self.stops = stops
        self._fresh = False
        """Whether to drop white space, because it follows another part."""
        self._begun = False
        """Whether any non-white text has come since the last other part."""
        self._space: list[str] = []
        """White space at the end of the text so far."""
        self.end = 0
        """End of the emitted text, in characters of the answer's text."""

    def feed(self, text: str, at: int, *, looks: bool = True) -> str:
        """Add text that starts at `at`, and return the text to emit.

        looks: search for stop strings.
        """
        if self._fresh:
            solid = text.lstrip()
            at, text = at + len(text) - len(solid), solid
        if not text:
            return ""
        if self._fresh or not (self._begun or self._space):
            self._fresh, self.end = False, at
        if not self._begun:
            if text.isspace():
                self._space.append(text)
                return ""
            text, self._begun, self._space = "".join([*self._space, text]), True, []
        return self._shown(self.stops.feed(text) if looks else text)

    def interrupt(self) -> str:
        """Return the rest of the text, because a part of another kind starts."""
        emitted = self._shown(self.stops.flush()) if self._begun else ""
        self._fresh, self._begun, self._space = True, False, []
        return emitted

    def finish(self) -> str:
        """End the text and return the rest."""
        if self._fresh:
            return ""
        space = "".join(self._space)
        emitted = space if self._begun else self.stops.feed(space)
        self._space = []
        if not self.stops.stopped:
            emitted += self.stops.flush()
        self.end += len(emitted)
        return emitted

    def _shown(self, text: str) -> str:
        solid = text if self.stops.stopped else text.rstrip()
        emitted = ""
        if solid or self.stops.stopped:
            emitted = "".join([*self._space, solid])
            self._space = []
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])
        self.end += len(emitted)
        return emitted
