"""Checks the type of each JSON schema keyword's value.

It runs first, so other code can rely on it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.grammars.refusals import SchemaError


def check_keywords(schema: Any, path: str) -> None:
    """Raise `SchemaError` if `schema` is not a schema, or a keyword's value has a wrong type."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise SchemaError(path, "a schema must be an object, `true` or `false`")
    for key, value in schema.items():
        if key in _MUST_BE:
            is_right, what = _MUST_BE[key]
            if not is_right(value):
                raise SchemaError(path, f"`{key}` must be {what}")


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_limit(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_type(value: Any) -> bool:
    return _is_text(value) or _is_texts(value)


_MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (_is_object, "an object")),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "enum"), (_is_list, "a list")),
    **dict.fromkeys(("format", "pattern", "$ref", "$id"), (_is_text, "a string")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_limit, "a number (or a boolean, as in draft 4)")),
    **dict.fromkeys(
        (f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")),
        (_is_size, "a whole number of at least 0"),
    ),
    "required": (_is_texts, "a list of strings"),
    "type": (_is_type, "a string or a list of strings"),
}
