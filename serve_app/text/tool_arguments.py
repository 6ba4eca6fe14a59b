"""Translates a call's arguments from the model's form to JSON, piece by piece.

The result does not depend on how the text is cut into pieces. Work is linear in the text. Never
raises: malformed arguments give JSON that the client will reject.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from serve_app.text.tool_format import QUOTE, Dialect, ToolFormat

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_PARAMETER, _NAMED, _CLOSED = "<parameter=", ">\n", "\n</parameter>\n"


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (more JSON, the text after the arguments, or None while they continue)."""


def arguments_reader(form: ToolFormat, parameters: Mapping[str, Any]) -> ArgumentsReader:
    """Return a reader for a call of a tool with these `parameters` (a JSON schema)."""
    if form.dialect is Dialect.TAGS:
        return _Tags(parameters)
    return _Json() if form.dialect is Dialect.JSON else _BareKeys()


def arguments_begin(form: ToolFormat) -> tuple[str, ...]:
    """Return the texts that arguments may start with."""
    return (_PARAMETER, form.end) if form.dialect is Dialect.TAGS else ("{",)


class Until:
    """Passes text through up to a marker. Holds back only text that may become the marker."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text before the marker, the text after it, or None if it has not arrived)."""
        seen = self._held + text
        before, found, after = seen.partition(self._marker)
        if found:
            self._held = ""
            return before, after
        keep = overlap(seen, self._marker)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def flush(self) -> str:
        """End the text and return the text that was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` match the start of `marker`, but not all of
    it."""
    longest = min(len(text), len(marker) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(marker[:count])), 0)


class _Json:
    """Reads arguments that are already JSON, and only finds their end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> tuple[str, str | None]:
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while found := _STRUCTURE.search(text, at):
            at = found.end()
            char = found[0]
            if char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return text[:at], text[at:]
        return text, None


class _Tags:
    """Reads parameters between tags. The schema says which values are text; all others are JSON."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._held = ""
        self._key = ""
        self._emitted = ""
        self._pieces: list[str] = []
        self._until: Until | None = None
        """Reads a key or a value up to its end; None between two parameters."""

    def feed(self, text: str) -> tuple[str, str | None]:
        emitted = ""
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            if self._until is not None:
                piece, rest = self._until.feed(rest)
                self._pieces.append(piece)
                if rest is not None:
                    emitted += self._part("".join(self._pieces))
            elif rest.startswith(_PARAMETER):
                rest = rest.removeprefix(_PARAMETER)
                self._begin(_NAMED)
            elif _PARAMETER.startswith(rest):
                self._held, rest = rest, None
            else:
                return emitted + ("}" if self._emitted else "{}"), rest
        return emitted, None

    def _begin(self, marker: str) -> None:
        self._until, self._pieces = Until(marker), []

    def _part(self, text: str) -> str:
        """Return JSON for a complete key or value."""
        if not self._key:
            self._key = text or " "
            self._begin(_CLOSED)
            return ""
        written = f"{', ' if self._emitted else '{'}{_quoted(self._key)}: {self._value(text)}"
        self._emitted, self._key, self._until = written, "", None
        return written

    def _value(self, text: str) -> str:
        schema = self._properties.get(self._key)
        if not is_text(schema):
            try:
                json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                pass  # not JSON: treat it as text
            else:
                return text.strip()
        return _quoted(text)


class _BareKeys:
    """Reads keys without quotes and strings between special marks."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._held = ""
        self._key: list[str] | None = None
        """The current key so far; None inside a value."""
        self._in_string = False

    def feed(self, text: str) -> tuple[str, str | None]:
        seen, at = self._held + text, 0
        self._held = ""
        emitted: list[str] = []
        while at < len(seen):
            if self._in_string:
                end = seen.find(QUOTE, at)
                stop = end if end >= 0 else len(seen) - overlap(seen[at:], QUOTE)
                emitted.append(_quoted(seen[at:stop])[1:-1])
                if end < 0:
                    self._held = seen[stop:]
                    break
                emitted.append('"')
                self._in_string = False
                at = end + len(QUOTE)
            elif seen.startswith(QUOTE, at):
                self._in_string = True
                emitted.append('"')
                at += len(QUOTE)
            elif QUOTE.startswith(seen[at : at + len(QUOTE)]):
                self._held = seen[at:]
                break
            else:
                emitted.append(self._sign(seen[at]))
                at += 1
                if not self._open:
                    return "".join(emitted), seen[at:]
        return "".join(emitted), None

    def _sign(self, char: str) -> str:
        """Return JSON for a character outside strings."""
        if char in "{[":
            self._open.append(char)
        elif char in "}]":
            del self._open[-1:]
        elif char == "," or self._key is None:
            self._key = [] if char == "," and self._open[-1:] == ["{"] else None
            return ", " if char == "," else char
        elif char == ":":
            key, self._key = "".join(self._key), None
            return f"{_quoted(key)}: "
        else:
            self._key.append(char)
            return ""
        self._key = [] if char == "{" else None
        return char


def is_text(schema: Any) -> bool:
    """Whether a parameter's value is text, which `Dialect.TAGS` writes unchanged."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
