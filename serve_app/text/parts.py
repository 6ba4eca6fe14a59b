"""The parts of an answer, and what they show of its text: no white space at their borders, and no stop strings."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.text.stop import StopMatcher


class Kind(StrEnum):
    """The destination of a part."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """A call begins; the text is the tool's name."""
    ARGUMENTS = "arguments"
    """More of the newest call's arguments, JSON."""


@dataclass(frozen=True, slots=True)
class Part:
    """`call` counts the calls of the message. at: of content, where it begins in the answer's text, in characters."""

    kind: Kind
    text: str
    call: int = 0
    at: int = field(default=0, compare=False)

    @property
    def end(self) -> int:
        """Where content ends in the answer's text."""
        return self.at + len(self.text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined; each call stays separate."""
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        first = runs[-1][0] if runs else None
        if first is not None and part.kind is first.kind is not Kind.CALL and part.call == first.call:
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return [Part(first.kind, "".join(texts), first.call, first.at) for first, texts in runs]


class PlainText:
    """The parts of an answer that is content alone."""

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
        """What more text adds. looks: whether it is searched for stop strings."""
        return self._tell(self._stops.feed(text) if looks else text)

    def finish(self) -> list[Part]:
        """End of the text: text that was held back is not a stop string."""
        return self._tell(self._stops.flush())

    def _tell(self, text: str) -> list[Part]:
        self._end += len(text)
        return [Part(Kind.CONTENT, text, 0, self._end - len(text))] if text else []


class TrimmedText:
    """The text of one kind of parts, up to a stop string, without white space next to parts of other kinds.

    Leading white space is kept or dropped once text follows, since it may precede a call.
    """

    def __init__(self, stops: StopMatcher) -> None:
        self.stops = stops
        self._fresh = False
        """Whether white space is dropped now, because it follows another part."""
        self._begun = False
        """Whether anything but white space has come since the last other part."""
        self._space: list[str] = []
        """White space at the end of the text so far."""
        self.end = 0
        """End of the emitted text, in characters of the answer's text."""

    def feed(self, text: str, at: int, *, looks: bool = True) -> str:
        """What can be shown of more text, which begins at `at`. looks: whether it is searched for stop strings."""
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
        """Another part begins; returns the rest of the text before it."""
        told = self._shown(self.stops.flush()) if self._begun else ""
        self._fresh, self._begun, self._space = True, False, []
        return told

    def finish(self) -> str:
        """End of the text; returns its rest."""
        if self._fresh:
            return ""
        space = "".join(self._space)
        told = space if self._begun else self.stops.feed(space)
        self._space = []
        if not self.stops.stopped:
            told += self.stops.flush()
        self.end += len(told)
        return told

    def _shown(self, text: str) -> str:
        solid = text if self.stops.stopped else text.rstrip()
        told = ""
        if solid or self.stops.stopped:
            told = "".join([*self._space, solid])
            self._space = []
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])
        self.end += len(told)
        return told
