"""What all request bodies and their parts share: strictness, and refusals that name the field."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from serve_app.api.bodies.ignored import ANYTHING, Ignored, changes_nothing

SHOWN = 64
"""Characters of a client's text that an error repeats at most."""
MAX_CONTAINERS = 32_768
"""JSON objects and arrays of one body. The parser holds the interpreter until it is done: for 4 MiB
of small objects ten times as long as for one text."""

_STRING_OR_OPENING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


def has_too_many_containers(raw: bytes) -> bool:
    """Whether a body, valid JSON or not, holds more than `MAX_CONTAINERS`. Others may run
    meanwhile."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_CONTAINERS:
        return False
    openings = (match for match in _STRING_OR_OPENING.finditer(raw) if match[0] in (b"{", b"["))
    return next(islice(openings, MAX_CONTAINERS, None), None) is not None


def refusal(message: str) -> PydanticCustomError:
    """The error of a value that cannot be taken; `message` follows the field's name."""
    # Braces are the template syntax of pydantic's custom errors.
    return PydanticCustomError("refused", "{message}", {"message": message})


def unfit(name: str, message: str) -> PydanticCustomError:
    """The same for the field `name` of the object that is checked."""
    return PydanticCustomError("unfit", "{message}", {"name": name, "message": message})


def check_ignored(name: str, value: object, ignored: Ignored) -> None:
    """Raise the refusal of a field that no model declares, unless it is null or changes nothing."""
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
    """Fields beside the declared ones that may be sent."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        # Done here and not with extra="forbid", which collects one error for each of a million
        # fields.
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
        told = handler(core_schema)
        schema = handler.resolve_ref_schema(told)
        declared = schema.setdefault("properties", {})
        schema["properties"] = {**ignored_schemas(cls.ignores), **declared}
        schema["additionalProperties"] = {"type": "null"}
        return told


class Variant(Body):
    """An object of one of several types."""

    needs: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The types, and the fields that each must have."""

    type: str

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name in self.needs[self.type]:
            if getattr(self, name) is None:
                raise unfit(name, "is required")
        return self

    @classmethod
    def check_types(cls, value: object, noun: str) -> None:
        """Raise the refusal of a list that holds an object of a type that is none of these; `noun`
        is what it holds."""
        for i, item in enumerate(value if isinstance(value, list) else ()):
            kind = item.get("type") if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in cls.needs:
                raise refusal(f"{noun} {i}: unsupported type {kind[:SHOWN]!r}")


def ignored_schemas(ignored: Ignored) -> dict[str, Any]:
    """Of fields that are taken without effect, or refused."""
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
    """Numbers as JSON means them: 16.0 is an integer, alone or in a list of ids."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and value and type(value[0]) is float:
        return [int(item) if type(item) is float and item.is_integer() else item for item in value]
    return value
