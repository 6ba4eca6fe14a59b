"""Tests whether objects with `patternProperties` can have undeclared properties.

It walks a small grammar for each object.
"""

import json
from typing import Any

from serve_app.grammars import library
from serve_app.grammars.refusals import Refusal, SchemaError
from serve_app.grammars.walk import dead_end

MAX_PROBES = 64
"""Maximum per request; equal objects count once."""
MAX_PROBE_CHARS = 2**15
"""Maximum characters of all objects of a request."""
_MASKS, _PROPERTY_MASKS = 64, 4
"""Masks per walk, and more per property: it must pass all declared properties and enter the next
name."""


class Probes:
    """The probed objects of one request. Each is built and walked once."""

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}
        self._chars = 0

    def can_name_more(self, schema: dict[str, Any], path: str) -> bool:
        """Return whether an object can have a property besides those of `schema`.

        All of the schema's `properties` must be required. Raises `SchemaError` with `path` if the
        request has too many such objects.
        """
        text = json.dumps(schema)
        if text not in self._found:
            self._chars += len(text)
            if len(self._found) == MAX_PROBES or self._chars > MAX_PROBE_CHARS:
                reason = (
                    f"there are more than {MAX_PROBES} different objects with `patternProperties`, or their names and "
                    f"patterns have more than {MAX_PROBE_CHARS} characters"
                )
                raise SchemaError(path, reason, Refusal.TOO_LARGE)
            self._found[text] = _can_name_more(schema)
        return self._found[text]


def _can_name_more(schema: dict[str, Any]) -> bool:
    try:
        text = library.from_schema(schema)
        library.check(text)
    except library.GrammarError:
        return True  # the whole schema is refused for this
    return dead_end(text, _MASKS + _PROPERTY_MASKS * len(schema["properties"])) is None
