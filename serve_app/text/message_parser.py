"""Splits an answer's text into reasoning, content and tool calls. Independent of tokens and HTTP.

The result does not depend on how the text is cut into pieces, so a streamed answer equals the whole
one. Only text that may become a marker or a stop string is held back. Stop strings are searched
only in content, and end it. Text that looks like a call but is not valid is content. Never raises.
"""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.text.parts import Kind, Part, TrimmedText, joined
from serve_app.text.stop import StopMatcher
from serve_app.text.tool_arguments import ArgumentsReader, Until, arguments_begin, arguments_reader, overlap
from serve_app.text.tool_format import Thinking, ToolFormat

MOST_SPACE = 64
"""Maximum white space before a reasoning, in characters."""


class MessageParser:
    """Parses one answer: call `feed` with its text, then `finish`.

    After `stopped` becomes True, no more parts are returned.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        parameters: Mapping[str, Mapping[str, Any]],
        thinking: Thinking | None = None,
        stops: StopMatcher | None = None,
    ) -> None:
        """parameters: JSON schemas of the tools that may be called, by name."""
        reasoning = None if thinking is None else thinking.form
        self._tools = tools if parameters else None
        self._parameters = parameters
        self._reasoning = reasoning
        self._close = Until(reasoning.close) if reasoning is not None else None
        self._arguments: ArgumentsReader | None = None
        self._held = ""
        self._num_fed = 0
        self._parts: list[Part] = []
        self._content_text = TrimmedText(stops or StopMatcher(()))
        self._thought = TrimmedText(StopMatcher(()))
        self._looks = True
        self._begun = False
        """Whether any non-white text has come since the reasoning."""
        self.num_calls = 0
        self._state: Callable[[str], str] = self._content if reasoning is None else self._start
        if thinking is not None and thinking.begun:
            self._enter_reasoning()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._content_text.stops.stopped

    @property
    def in_call(self) -> bool:
        """Whether the arguments of the newest call are incomplete."""
        return self._state == self._call

    def feed(self, text: str, *, looks: bool = True) -> list[Part]:
        """Add text and return the new parts. looks: search its content for stop strings."""
        self._looks = looks
        self._num_fed += len(text)
        rest, self._held = self._held + text, ""
        while rest and not self.stopped:
            rest = self._state(rest)
        return self._take()

    def finish(self) -> list[Part]:
        """End the text and return the rest.

        Held-back text is then no marker. An incomplete call stays incomplete.
        """
        held, self._held = self._held, ""
        if self._state == self._think:
            assert self._close is not None
            self._say(Kind.REASONING, self._close.flush())
        elif self._state not in (self._call, self._end):
            self._say(Kind.CONTENT, held)
            self._emit(Kind.CONTENT, self._content_text.finish(), self._content_text.end)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts

    def _emit(self, kind: Kind, text: str, end: int = 0) -> None:
        if text:
            self._parts.append(Part(kind, text, max(0, self.num_calls - 1), end - len(text)))

    def _say(self, kind: Kind, text: str, behind: int = 0) -> None:
        """Emit text of this kind. behind: number of fed characters after it."""
        trimmed = self._content_text if kind is Kind.CONTENT else self._thought
        emitted = trimmed.feed(text, self._num_fed - behind - len(text), looks=self._looks)
        self._emit(kind, emitted, trimmed.end)
        self._begun = self._begun or bool(text.strip())

    def _start(self, text: str) -> str:
        assert self._reasoning is not None
        solid = text.lstrip()
        if len(text) - len(solid) <= MOST_SPACE:
            if solid.startswith(self._reasoning.open):
                self._enter_reasoning()
                return solid.removeprefix(self._reasoning.open)
            if self._reasoning.open.startswith(solid):
                self._held = text
                return ""
        self._state = self._content
        return text

    def _enter_reasoning(self) -> None:
        self._state = self._think
        self._thought.interrupt()

    def _think(self, text: str) -> str:
        assert self._close is not None
        piece, rest = self._close.feed(text)
        self._say(Kind.REASONING, piece)
        if rest is None:
            return ""
        self._state, self._begun = self._content, False
        self._content_text.interrupt()
        return rest

    def _content(self, text: str) -> str:
        at = self._begin_at(text)
        if at is None:
            self._say(Kind.CONTENT, text)
            return ""
        self._say(Kind.CONTENT, text[:at], len(text) - at)
        if self.stopped:
            return ""
        assert self._tools is not None
        found = self._head(text[at:])
        if found is None:
            self._held = text[at:]
            return ""
        name, length = found
        if not length:
            self._say(Kind.CONTENT, text[at], len(text) - at - 1)
            return text[at + 1 :]
        self._emit(Kind.CONTENT, self._content_text.interrupt(), self._content_text.end)
        self.num_calls += 1
        self._emit(Kind.CALL, name)
        self._arguments = arguments_reader(self._tools, self._parameters[name])
        self._state = self._call
        return text[at + length :]

    def _begin_at(self, text: str) -> int | None:
        """Return the position in `text` where a call may start, or None."""
        if self._tools is None:
            return None
        begin = self._tools.begin
        if self._tools.anchor:
            at = text.find(begin)
            keep = overlap(text, begin)
            return at if at >= 0 else len(text) - keep if keep else None
        solid = text.lstrip()
        begins = solid.startswith(begin) or begin.startswith(solid)
        return len(text) - len(solid) if solid and begins and not self._begun else None

    def _head(self, text: str) -> tuple[str, int] | None:
        """Return (name, length) of the head of a call at the start of `text`.

        Length 0: not a call. None: more text is needed.
        """
        assert self._tools is not None
        waiting = False
        for name in self._parameters:
            head = f"{self._tools.begin}{name}{self._tools.middle}"
            for following in arguments_begin(self._tools):
                if text.startswith(head + following):
                    return name, len(head)
                waiting = waiting or (head + following).startswith(text)
        return None if waiting else ("", 0)

    def _call(self, text: str) -> str:
        assert self._arguments is not None
        emitted, rest = self._arguments.feed(text)
        self._emit(Kind.ARGUMENTS, emitted)
        if rest is None:
            return ""
        self._state = self._end
        return rest

    def _end(self, text: str) -> str:
        assert self._tools is not None
        end = self._tools.end
        if end.startswith(text) and text != end:
            self._held = text
            return ""
        self._state, self._begun = self._content, True
        return text.removeprefix(end)
