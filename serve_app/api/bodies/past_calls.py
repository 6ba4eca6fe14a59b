"""Arguments of calls that were made, as they come back: the JSON that a model wrote, which may be
cut or broken."""

import json
from typing import Any

from pydantic_core import from_json

from serve_app.text.tool_format import UNREADABLE

_MOST_DEPTH = 64


def arguments_of(text: str) -> dict[str, Any]:
    """The object that `text` is, or that its beginning makes if it was cut; else an object that
    holds the text.

    Nothing raises. The result can be written as JSON (but for NaN and infinity, which Python writes
    too).
    """
    for read in (json.loads, _beginning):
        try:
            value = read(text or "{}")
            return {} if value is None else _writable(value)
        except (ValueError, RecursionError):
            pass
    return {UNREADABLE: _whole(text)} if text.strip() else {}


def as_object(value: dict[str, Any]) -> dict[str, Any]:
    """An object that a client sent, if it can be written; else one that holds it as text. Raises
    `ValueError`."""
    try:
        return _writable(value)
    except (ValueError, RecursionError):
        return {UNREADABLE: json.dumps(value)}


def as_json(text: str) -> str:
    """`text` if it is an object that every client can read, else `arguments_of` it as JSON. Nothing
    raises."""
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
    """The object `value` without half characters. Raises `ValueError` for what is none or nested
    too deeply."""
    if not isinstance(value, dict) or _depth(value) > _MOST_DEPTH:
        raise ValueError
    text = json.dumps(value, ensure_ascii=False)
    whole = _whole(text)
    fit: dict[str, Any] = value if whole == text else json.loads(whole)
    return fit


def _whole(text: str) -> str:
    """`text` with U+FFFD in place of half characters."""
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
