"""Arguments of earlier tool calls, as clients send them back.

They are JSON that a model wrote, so they may be incomplete or invalid.
"""

import json
from typing import Any

from pydantic_core import from_json

from serve_app.text.tool_format import UNREADABLE

_MOST_DEPTH = 64


def arguments_of(text: str) -> dict[str, Any]:
    """Return the object in `text` or in its valid beginning, else one that contains the text.

    Never raises. The result can be written as JSON; NaN and infinity remain, which only Python
    writes and reads.
    """
    for read in (json.loads, _beginning):
        try:
            value = read(text or "{}")
            return {} if value is None else _writable(value)
        except (ValueError, RecursionError):
            pass
    return {UNREADABLE: _whole(text)} if text.strip() else {}


def as_object(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object from a client, or one that contains it as text if it is nested too deeply.

    Raises `ValueError` if it cannot be written as JSON.
    """
    try:
        return _writable(value)
    except (ValueError, RecursionError):
        return {UNREADABLE: json.dumps(value)}


def as_json(text: str) -> str:
    """Return `text` if it is a JSON object that every client can read, else a repaired one.

    Never raises.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
        if _writable(value) is value and json.dumps(value, allow_nan=False):
            return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(arguments_of(text), allow_nan=False)
    except ValueError:
        return json.dumps({UNREADABLE: _whole(text)})


def _beginning(text: str) -> Any:
    return from_json(text, allow_partial="trailing-strings")


def _writable(value: Any) -> dict[str, Any]:
    """Return the object `value` without lone surrogates.

    Raises `ValueError` for other types and for too deep nesting.
    """
    if not isinstance(value, dict) or _depth(value) > _MOST_DEPTH:
        raise ValueError
    text = json.dumps(value, ensure_ascii=False)
    whole = _whole(text)
    fit: dict[str, Any] = value if whole == text else json.loads(whole)
    return fit


def _whole(text: str) -> str:
    """Return `text` with U+FFFD instead of lone surrogates."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _depth(value: Any) -> int:
    depth = 0
    level = [value]
    while level and depth <= _MOST_DEPTH:
        level = [item for each in level for item in _items(each)]
        depth += 1
    return depth


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse(name: str) -> None:
    raise ValueError(name)
