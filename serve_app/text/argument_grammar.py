"""Lark rules for the arguments of a tool call, in each dialect, from the tool's JSON schema.

`grammars.json_schema` handles JSON. The other dialects write the same values differently.
Unsupported parts of a schema are refused by keyword and path, never ignored.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serve_app import grammars
from serve_app.errors import InvalidRequestError
from serve_app.text.tool_arguments import is_text
from serve_app.text.tool_format import QUOTE, Dialect

_NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "$defs", "definitions", "deprecated"}
_DEFINITIONS = ("$defs", "definitions")
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items", "minItems", "maxItems"}
_TEXT = {"type", "enum", "const", "minLength", "maxLength"}
_MAX_LOCAL_REFERENCES = 64
_FREE = "(?s:[^<]*)"


class ArgumentRules:
    """Collects rules, and the grammars that they use, for all tools of a request."""

    def __init__(self, dialect: Dialect, literal: Callable[[str], str]) -> None:
        """literal: returns the rule for a text that may contain control tokens."""
        self.dialect = dialect
        self.literal = literal
        self.rules: list[str] = []
        self.parts: dict[str, str] = {}
        self._any = ""

    def add(self, schema: Mapping[str, Any] | None, param: str) -> str:
        """Return a rule for arguments that `schema` accepts. None accepts any object.

        Raises `InvalidRequestError` naming `param`, keyword and path if it cannot be enforced.
        """
        if schema is None:
            self._any = self._any or self._any_object(param)
            return self._any
        return self.json(schema, param) if self.dialect is Dialect.JSON else _Schema(self, schema, param).whole()

    def _any_object(self, param: str) -> str:
        if self.dialect is Dialect.JSON:
            return self.json({"type": "object"}, param)
        if self.dialect is Dialect.TAGS:
            return self.rule(_ANY_TAGS)
        quote = self.literal(QUOTE)
        for name, body in _ANY_BARE_KEYS.items():
            self.rules.append(f"{name}: {body.replace('QUOTE', quote)}")
        return "any_object"

    def json(self, schema: Mapping[str, Any], param: str) -> str:
        """Return a rule for the JSON that `schema` accepts."""
        name = f"json_{len(self.parts)}"
        self.parts[name] = grammars.json_schema(schema, param=param)
        return f"@{name}"

    def rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"value_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


_ANY_TAGS = r'("<parameter=" /[^>\n]+/ ">\n" tag_text)*'
TAG_TEXT = "tag_text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"
_ANY_BARE_KEYS = {
    "any_object": '"{" (any_member ("," any_member)*)? "}"',
    "any_member": r'/[\w$.\-]+/ ":" any_value',
    "any_value": "any_object | any_list | any_text | /true|false|null/ | /-?(0|[1-9][0-9]*)(\\.[0-9]+)?/",
    "any_list": '"[" (any_value ("," any_value)*)? "]"',
    "any_text": "QUOTE /(?s:[^<]*)/ QUOTE",
}


class _Schema:
    """Rules for one tool's schema."""

    def __init__(self, rules: ArgumentRules, schema: Mapping[str, Any], param: str) -> None:
        self._rules = rules
        self._schema = schema
        self._param = param
        self._references = 0

    def whole(self) -> str:
        # Refuses invalid schemas, so that the code below can rely on the types of keywords' values.
        grammars.json_schema(self._schema, param=self._param)
        if self._rules.dialect is Dialect.TAGS:
            self._check(self._schema, _OBJECT, "")
            members = [
                (self._rules.rule(f"{_text(f'<parameter={key}>' + chr(10))} {self._tagged(value, key)}"), needed)
                for key, value, needed in self._members(self._schema, "")
            ]
            return self._rules.rule(" ".join(name if needed else f"{name}?" for name, needed in members) or '""')
        return self._object(self._schema, "")

    def _tagged(self, schema: Any, key: str) -> str:
        closed = _text("\n</parameter>\n")
        if not is_text(schema):
            shared = {name: self._schema[name] for name in _DEFINITIONS if name in self._schema}
            alone = {**schema, **shared}
            self._check_references(alone, f"/properties/{key}")
            return f"{self._rules.json(alone, self._param)} {closed}"
        self._check(schema, _TEXT, f"/properties/{key}")
        length = _length(schema)
        if length is not None:
            return f"/{length}\\n<\\/parameter>\\n/"  # one lexeme: the text may end with a newline
        values = _values(schema)
        return "tag_text" if values is None else f"({values}) {closed}"

    def _value(self, schema: Any, path: str) -> str:
        if not isinstance(schema, dict):
            raise self._refused(path, "every schema must be an object")
        schema = self._resolved(schema, path)
        if "anyOf" in schema:
            self._check(schema, {"anyOf"}, path)
            options = [self._value(option, f"{path}/anyOf/{i}") for i, option in enumerate(schema["anyOf"])]
            return self._rules.rule(" | ".join(options))
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "string":
            self._check(schema, _TEXT, path)
            quote = self._rules.literal(QUOTE)
            return self._rules.rule(f"{quote} ({_values(schema) or f'/{_length(schema) or _FREE}/'}) {quote}")
        if kind in ("integer", "number", "boolean", "null"):
            return self._rules.json(schema, self._param)
        raise self._refused(path, "a value must have one `type`, an `anyOf` or a `$ref`")

    def _resolved(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        while (reference := schema.get("$ref")) is not None:
            self._references += 1
            kind, _, name = str(reference).removeprefix("#/").partition("/")
            found = self._schema.get(kind, {}).get(name) if kind in _DEFINITIONS else None
            if not isinstance(found, dict) or self._references > _MAX_LOCAL_REFERENCES:
                raise self._refused(path, "`$ref` must point into `$defs`, without a cycle")
            schema = found
        return schema

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        self._check(schema, _OBJECT, path)
        members = list(self._members(schema, path))
        written = {
            key: self._rules.rule(f"{_text(f'{key}:')} {self._value(value, f'{path}/properties/{key}')}")
            for key, value, _ in members
        }
        needed = ' "," '.join(written[key] for key, _, need in members if need)
        # From the last member to the first: each rule matches what may follow the previous member.
        following, starts = "", []
        for key in [key for key, _, need in reversed(members) if not need]:
            starts.append(f"{written[key]} {following}")
            following = self._rules.rule(f'("," {written[key]})? {following}')
        if needed:
            return self._rules.rule(f'"{{" {needed} {following} "}}"')
        inner = f"({' | '.join(starts)})?" if starts else ""
        return self._rules.rule(f'"{{" {inner} "}}"')

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        self._check(schema, _ARRAY, path)
        if "items" not in schema:
            raise self._refused(path, "an array must have `items`")
        item = self._value(schema["items"], f"{path}/items")
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if high == 0:
            return self._rules.rule('"[" "]"')
        more = f'("," {item}){{{max(0, low - 1)},{"" if high is None else high - 1}}}'
        return self._rules.rule(f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"')

    def _check_references(self, schema: Any, path: str) -> None:
        """Refuse references to the whole schema.

        Each part is compiled separately, so these would refer to the part.
        """
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                reference = part.get("$ref")
                if isinstance(reference, str) and not reference.startswith(
                    tuple(f"#/{name}/" for name in _DEFINITIONS)
                ):
                    raise self._refused(path, "`$ref` must point into `$defs`")
                waiting += part.values()
            elif isinstance(part, list):
                waiting += part

    def _members(self, schema: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any, bool]]:
        properties = schema.get("properties", {})
        for key in schema.get("required", ()):
            if key not in properties:
                raise self._refused(path, f"`required` names {str(key)[:64]!r}, which is not a property")
        for key, value in properties.items():
            if not key or set(key) & set('<>:{}",\n'):
                raise self._refused(path, f"the property {key[:64]!r} has a name that cannot be written")
            yield key, value, key in schema.get("required", ())

    def _check(self, schema: Mapping[str, Any], known: set[str], path: str) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _NOTES:
                raise self._refused(path, f"`{keyword[:64]}` is not supported in this model's form of tool calls")

    def _refused(self, path: str, reason: str) -> InvalidRequestError:
        where = f" at {path}" if path else ""
        return InvalidRequestError(
            f"`{self._param}`: this JSON schema cannot be enforced{where}: {reason}",
            param=self._param,
            code=grammars.Refusal.UNSUPPORTED,
        )


def _values(schema: Mapping[str, Any]) -> str | None:
    """Return a rule for a text with fixed values (`enum`, `const`); None for any text."""
    if "const" not in schema and "enum" not in schema:
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return " | ".join(_text(value) for value in values if isinstance(value, str)) or None


def _length(schema: Mapping[str, Any]) -> str | None:
    """Return a regex for texts without marks and within the length limits; None without limits."""
    if _values(schema) is not None or not {"minLength", "maxLength"} & set(schema):
        return None
    return f"(?s:[^<]){{{int(schema.get('minLength', 0))},{schema.get('maxLength', '')}}}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
