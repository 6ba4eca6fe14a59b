"""Rewrites clients' JSON schemas so that llguidance enforces every bound.

Schemas that it cannot enforce are refused with the path of the part.
llguidance reads numbers as doubles and then as 64-bit integers. Some of its steps overflow or are
wrong without an error (one crashes the process). A rewritten schema never accepts more than the
client's. It accepts the same values, or fewer where its comment says so.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from serve_app.grammars.keywords import check_keywords
from serve_app.grammars.numbers import MAX_STATES, NumberError, exact_constant, exact_numbers, num_states, short
from serve_app.grammars.refusals import Refusal, SchemaError

Schema = dict[str, Any]
MAX_DEPTH = 64
"""Maximum nesting of a JSON schema."""
MAX_SIZE = 65_536
"""Maximum of `minLength`, `minItems` and `minProperties`: no answer is longer. Larger upper limits
are reduced to it."""
# Keywords that contain one schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "additionalItems")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_JOINING = ("$ref", "anyOf", "oneOf")
_SILENT = {"$defs", "definitions", "$id", "$schema", "title", "description", "default", "examples", "deprecated"}
MAX_FACTORS = 1_000_000
"""Maximum product of all `multipleOf` in a schema that joins constraints."""
_SIZES = ("Length", "Items", "Properties")
# Formats that describe the purpose of a text, not its form.
_FREE_FORMATS = {"path", "file-path", "directory-path", "password", "binary"}
_BASE64 = "^(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?$"
_PATTERNS = {
    "byte": _BASE64.format("A-Za-z0-9+/"),
    "base64": _BASE64.format("A-Za-z0-9+/"),
    "base64url": _BASE64.format("A-Za-z0-9_\\-"),
    "decimal": r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?$",
}
# pydantic's pattern for a Decimal. Its look-ahead refuses texts without a digit. Groups: of
# `max_digits` and `decimal_places` together, of `max_digits`, of `decimal_places`.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?:"
    r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,\d{1,3}\}0\*\$\)"
    r"\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d{1,3})\}0\*\$\)"
    r"|\(\?:\\d\{0,(?P<digits>\d{1,2})\}\|\(\?=\[\\d\.\]\{1,\d{1,3}\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"
    r"|\\d\*\\\.\?\\d\{0,(?P<fraction>\d{1,3})\}0\*\$"
    r"|\\d\*\\\.\?\\d\*\$)"
)


def prepared(schema: Any, can_name_more: Callable[[Schema, str], bool]) -> Schema:
    """Rewrite a schema so that llguidance enforces it with the client's meaning.

    can_name_more: returns whether an object of a schema (at a path) can have a property besides its
    required ones. Raises `SchemaError`.
    """
    check_depth(schema)
    if not isinstance(schema, Mapping):
        raise SchemaError("", "it must be an object")
    if "x-guidance" in schema:
        raise SchemaError("", "`x-guidance` changes how a schema is enforced")
    preparation = _Preparation(can_name_more, _joined_names(schema))
    written: Schema = preparation.schema(schema, "", "")
    preparation.check_references()
    return written


def check_depth(schema: Any) -> None:
    """Raise `SchemaError` if a schema is nested too deeply for recursion."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return
    raise SchemaError("", f"it is nested deeper than {MAX_DEPTH} levels", Refusal.TOO_LARGE)


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas directly inside a schema, with their paths."""
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", part) for i, part in enumerate(schema[key]) if isinstance(part, dict))
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{_step(name)}", part) for name, part in schema[key].items() if isinstance(part, dict))


def _joined_names(schema: Any) -> set[str] | None:
    """Return all property names if llguidance joins constraints in this schema; else None."""
    names, joins, waiting = set[str](), False, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            joins = joins or _joins(part)
            if isinstance(properties := part.get("properties"), dict):
                names.update(properties)
            if isinstance(required := part.get("required"), list):
                names.update(name for name in required if isinstance(name, str))
    return names if joins else None


def _joins(schema: Schema) -> bool:
    """Whether llguidance joins this schema's constraints with other schemas'."""
    return "allOf" in schema or (not schema.keys().isdisjoint(_JOINING) and len(schema.keys() - _SILENT) > 1)


class _Preparation:
    def __init__(self, can_name_more: Callable[[Schema, str], bool], joined_names: set[str] | None) -> None:
        self._can_name_more = can_name_more
        self._joined_names = joined_names
        self._paths: set[str] = set()
        """Paths of everything that is rewritten as a schema."""
        self._references: list[tuple[str, str, str]] = []
        """(path, path of the schema whose `$id` applies, value of `$ref`)."""
        self._factors: set[Any] = set()
        self._mixes = ""
        """Path of a schema whose constraints are joined with others'."""

    def schema(self, schema: Any, path: str, base: str) -> Any:
        self._paths.add(path)
        check_keywords(schema, path)
        if isinstance(schema, bool):
            return schema
        if path and isinstance(schema.get("$id", schema.get("id")), str):
            base = path
        written: Schema = {}
        for key, value in schema.items():
            written[key] = self._keyword(key, value, f"{path}/{key}", base)
        if (reference := schema.get("$ref")) is not None:
            self._references.append((path, base, reference))
        if "allOf" in schema or ({"$ref", "anyOf", "oneOf", "patternProperties"} & {*schema} and len(schema) > 1):
            self._mixes = self._mixes or f"{path}/"
        self._sizes(written, path)
        self._text(written)
        try:
            factor = exact_numbers(written)
        except NumberError as error:
            raise SchemaError(path, str(error)) from None
        if factor is not None:
            self._factors.add(factor)
        return self._names(written, path)

    def check_references(self) -> None:
        """Check that every `$ref` leads to a rewritten schema, and the size of joined `multipleOf`.

        A part that only a `$ref` reaches is not rewritten. llguidance computes least common
        multiples in 32 bits.
        """
        for path, base, reference in self._references:
            resource, _, fragment = reference.partition("#")
            if not fragment.startswith("/"):
                continue
            target = "" if resource else base
            if f"{target}{unquote(fragment)}" not in self._paths:
                raise SchemaError(path, f"`$ref` does not refer to a schema: {reference[:64]}")
        product = 1
        for coefficient, exponent in self._factors:
            product *= coefficient * 10 ** max(e for _, e in self._factors) // 10**exponent
        if sum(num_states(coefficient) for coefficient, _ in self._factors) > MAX_STATES:
            reason = f"all `multipleOf` together must be {MAX_STATES} at most, without their factors 2 and 5"
            raise SchemaError("", reason, Refusal.TOO_LARGE)
        states = math.prod({num_states(coefficient) for coefficient, _ in self._factors})
        if self._mixes and len(self._factors) > 1 and (product > MAX_FACTORS or states > MAX_STATES):
            raise SchemaError(self._mixes.rstrip("/"), "`multipleOf` of several large values in one schema")

    def _keyword(self, key: str, value: Any, path: str, base: str) -> Any:
        if key in _MANY and isinstance(value, list):
            return [self.schema(part, f"{path}/{i}", base) for i, part in enumerate(value)]
        if key in _ONE:
            return self.schema(value, path, base)
        if key in _NAMED:
            return {name: self.schema(part, f"{path}/{_step(name)}", base) for name, part in value.items()}
        try:
            if key == "const":
                exact_constant(value)
            elif key == "enum":
                for constant in value:
                    exact_constant(constant)
        except NumberError as error:
            raise SchemaError(path, str(error)) from None
        return value

    def _sizes(self, schema: Schema, path: str) -> None:
        for what in _SIZES:
            for key, is_low in ((f"min{what}", True), (f"max{what}", False)):
                if key not in schema:
                    continue
                size = int(schema[key])
                if is_low and size > MAX_SIZE:
                    raise SchemaError(path, f"`{key}` is {short(size)}; the limit is {MAX_SIZE}", Refusal.TOO_LARGE)
                schema[key] = min(size, MAX_SIZE)

    def _text(self, schema: Schema) -> None:
        form, pattern = schema.get("format"), schema.get("pattern")
        if pattern is not None and (match := _DECIMAL.fullmatch(pattern)):
            schema["pattern"] = pattern = _decimal(match)
        if form in _FREE_FORMATS:
            del schema["format"]
        elif form in _PATTERNS:
            del schema["format"]
            if pattern is None:
                schema["pattern"] = _PATTERNS[form]
            else:
                schema["allOf"] = [*schema.get("allOf", ()), {"pattern": _PATTERNS[form]}]

    def _names(self, schema: Schema, path: str) -> Schema:
        """Handle patterns that allow only declared names.

        llguidance would write a comma and then find no name.
        """
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties")
        required = {*schema.get("required", ())}  # duplicate names count once
        if schema.get("minProperties", 0) > len(required) + 1:
            raise SchemaError(path, "`minProperties` must be at most the number of required properties plus 1")
        if not patterns:
            return schema
        names = sorted({*properties, *required, *(self._joined_names or ())})
        probe = {
            "type": "object",
            "properties": dict.fromkeys(names, True),
            "required": names,
            "patternProperties": {name: part is not False for name, part in patterns.items()},
            "additionalProperties": schema.get("additionalProperties") is not False,
            "minProperties": len(names) + 1,
        }
        if self._can_name_more(probe, path):
            return schema
        if self._joined_names is not None:
            reason = "`patternProperties` allows no name besides the properties of this joined schema"
            raise SchemaError(path, reason)
        if not {*properties} <= required:
            raise SchemaError(path, "`patternProperties` allows no name besides those in `properties`; leave it out")
        return {**schema, "maxProperties": min(schema.get("maxProperties", MAX_SIZE), len(required))}


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _decimal(match: re.Match[str]) -> str:
    """Return a Decimal pattern without a look-ahead.

    It accepts fewer texts than the original if they have too many zeros.
    """
    whole, places, most, fraction = (
        None if match[name] is None else int(match[name]) for name in ("whole", "places", "digits", "fraction")
    )
    if whole is not None and places is not None:
        numbers = [f"[0-9]{{1,{whole}}}(?:\\.[0-9]{{0,{places}}})?"] if whole else []
        numbers += [f"\\.[0-9]{{1,{places}}}"] if places else []
    elif most is not None:
        numbers = [f"[0-9]{{1,{most}}}", *(f"[0-9]{{{n}}}\\.[0-9]{{1,{most - n}}}" for n in range(most))]
    elif fraction is not None:
        numbers = [f"[0-9]+(?:\\.[0-9]{{0,{fraction}}})?", *([f"\\.[0-9]{{1,{fraction}}}"] if fraction else [])]
    else:
        numbers = ["[0-9]+\\.?[0-9]*", "\\.[0-9]+"]
    return f"^[+-]?(?:{'|'.join(numbers)})$"


def parse(text: str) -> Mapping[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None
