"""JSON schemas that ask for much work, or for the impossible."""

from functools import reduce
from typing import Any


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    return reduce(lambda schema, _: {"type": "object", "properties": {"a": schema}}, range(depth), inner)


def one_of(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    inner = one_of(depth - 1)
    return {
        "oneOf": [{"type": "object", "properties": {"a": inner}, "required": ["a"]}, {"type": "array", "items": inner}]
    }


def _with_pattern(number: int) -> dict[str, Any]:
    key = f"k{number}"
    text = {"type": "string", "pattern": f"^[a-z]{{{number + 1},{number + 50}}}$"}
    return {"type": "object", "properties": {key: text}, "required": [key]}


HOSTILE_SCHEMAS: dict[str, dict[str, Any]] = {
    "nested 28": nested(28),
    "nested 200": nested(200),
    "nested 100,000 lists": {"enum": [reduce(lambda inner, _: [inner], range(100_000), [])]},  # type: ignore[arg-type, return-value]
    "oneOf 8 deep": one_of(8),
    "oneOf 14 deep": one_of(14),
    "200 anyOf with patterns": {"anyOf": [_with_pattern(number) for number in range(200)]},
    "refers to itself": {"$ref": "#"},
    "refers in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "remote": {"$ref": "http://elsewhere/schema.json"},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "a million letters": {"type": "string", "minLength": 1_000_000},
    "20,000 values": {"enum": [f"value-{i}" for i in range(20_000)]},
    "16 patterns at once": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, 17)]},
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 4},
    "exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
    "repeated repetition": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "2,000 required fields": {
        "type": "object",
        "properties": {f"field {i}": {"type": "string"} for i in range(2_000)},
        "required": [f"field {i}" for i in range(2_000)],
    },
    "2,000 equal patternProperties": {"anyOf": [{"patternProperties": {"a": {}}}] * 2_000},
    "2,000 different patternProperties": {"anyOf": [{"patternProperties": {f"a{i}": {}}} for i in range(2_000)]},
    "60 patternProperties of long names": {
        "anyOf": [{"patternProperties": {f"^[a-z]{{1900}}{i}$": {}}, "additionalProperties": False} for i in range(60)]
    },
    "patternProperties beside 30 names, 60 times": {
        "anyOf": [
            {"properties": {f"{i}_{j}": {} for j in range(30)}, "patternProperties": {f"^[a-z]{{1900}}{i}$": {}}}
            for i in range(60)
        ]
    },
    "too long, of patternProperties": {
        "anyOf": [{"patternProperties": {"a" * 5_000 + str(i): {}}} for i in range(60)],
    },
    "long parts beside a dead end": {
        "$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}, "required": ["l"]}},
        "type": "object",
        "properties": {
            **{f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1990}}{i}$"} for i in range(200)},
            "dead": {"$ref": "#/$defs/n"},
        },
        "required": ["dead"],
    },
}
