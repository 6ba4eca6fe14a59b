"""Base classes of request bodies: strict types, and errors that name the field."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from serve_app.api.bodies.ignored import ANYTHING, Ignored, changes_nothing

SHOWN = 64
"""Maximum number of characters of a client's text in an error."""
MAX_CONTAINERS = 32_768
"""Maximum number of JSON objects and arrays in one body.

The parser holds the GIL until it is done, for 4 MiB of small objects 10 times as long as for one
text.
"""

_STRING_OR_OPENING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


def has_too_many_containers(raw: bytes) -> bool:
    """Whether a body, valid JSON or not, contains more than `MAX_CONTAINERS` objects and arrays.

    Other threads may run between matches, but not while the parser runs.
    """
    if raw.count(b"{") + raw.count(b"[") <= MAX_CONTAINERS:
        return False
    openings = (match for match in _STRING_OR_OPENING.finditer(raw) if match[0] in (b"{", b"["))
    return next(islice(openings, MAX_CONTAINERS, None), None) is not None


def refusal(message: str) -> PydanticCustomError:
    """Return the error for an invalid value. `message` follows the field's name."""
    # Braces are the template syntax of pydantic's custom errors.
    return PydanticCustomError("refused", "{message}", {"message": message})


def unfit(name: str, message: str) -> PydanticCustomError:
    """Return the error for field `name` of the object under validation."""
    return PydanticCustomError("unfit", "{message}", {"name": name, "message": message})


def check_ignored(name: str, value: object, ignored: Ignored) -> None:
    """Raise an error for an undeclared field, unless it is null or has an ignored value."""
    if value is None:
        return
    if name not in ignored:
        raise PydanticCustomError("unknown_field", "is not a field of this server", {"name": name[:SHOWN]})
    harmless = ignored[name]
    if changes_nothing(value, harmless):
        return
    if not harmless:
        raise unfit(name, "is not supported by this server; leave it out")
    values = " or ".join(orjson.dumps(good).decode() for good in harmless)
    raise unfit(name, f"is supported only as {values}; leave it out")


class Body(BaseModel):
    """Base of all bodies and their parts."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    ignores: ClassVar[Ignored] = {}
    """Undeclared fields that are accepted."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        # extra="forbid" would collect one error per unknown field, perhaps a million.
        if not isinstance(data, dict):
            return data
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name, value in data.items():
            if name not in known:
                check_ignored(name, value, cls.ignores)
        given = (name for name, field in known.items() if data.get(name) is not None or field.is_required())
        return {name: _whole(data[name]) for name in given if name in data}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        declared = schema.setdefault("properties", {})
        schema["properties"] = {**ignored_schemas(cls.ignores), **declared}
        schema["additionalProperties"] = {"type": "null"}
        return reference


class Variant(Body):
    """An object of one of several types."""

    needs: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The required fields of each type."""

    type: str

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name in self.needs[self.type]:
            if getattr(self, name) is None:
                raise unfit(name, "is required")
        return self

    @classmethod
    def check_types(cls, value: object, noun: str) -> None:
        """Raise an error if a list contains an object of an unknown type.

        `noun`: what the error calls an item.
        """
        for i, item in enumerate(value if isinstance(value, list) else ()):
            kind = item.get("type") if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in cls.needs:
                raise refusal(f"{noun} {i}: unsupported type {kind[:SHOWN]!r}")


def ignored_schemas(ignored: Ignored) -> dict[str, Any]:
    """Return the JSON schemas of ignored and refused fields."""
    schemas: dict[str, Any] = {}
    for name, harmless in ignored.items():
        if harmless is ANYTHING:
            schemas[name] = {"description": "Ignored."}
        elif not harmless:
            schemas[name] = {"type": "null", "description": "Not supported."}
        else:
            schemas[name] = {"enum": [*harmless, None], "description": "Ignored; no other value is supported."}
    return schemas


def _whole(value: Any) -> Any:
    """Return `value` with floats like 16.0 as integers, alone or in a list, as in JSON schemas."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and value and type(value[0]) is float:
        return [int(item) if type(item) is float and item.is_integer() else item for item in value]
    return value
