"""JSON schemas of users: every bound is kept, what pydantic writes is served, and what cannot be is
refused by path."""

import json
import math
import random
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import Base64Bytes, BaseModel, SecretBytes, SecretStr

from serve_app import grammars
from serve_app.errors import EngineError, InvalidRequestError
from serve_app.grammars import Refusal
from serve_app.grammars.numbers import MAX_STATES
from tests.examples import examples
from tests.grammars.test_random_schemas import BYTES, EOS, walk

MAX_INT64 = 2**63 - 1


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = BYTES.matcher(grammars.json_schema(schema))
    if not matcher.consume(list(text.encode())):
        return False
    allowed = matcher.allowed()
    return allowed is not None and EOS in allowed


def refusal(schema: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        grammars.json_schema(schema)
    return refused.value


def keeps(schema: dict[str, Any], text: str) -> bool:
    """As a reader of JSON sees it, a fraction being a double; multiples exactly, as `jsonschema`
    divides doubles."""
    value = json.loads(text)
    return (
        (schema["type"] == "number" or value == int(value))
        and value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or Fraction(text) % Fraction(str(schema["multipleOf"])) == 0)
    )


_LIMITS = st.one_of(
    st.integers(-12, 12),
    st.sampled_from([0.5, 0.25, -0.5, 1e-7, 0.1, -0.0, 12.5, 1e15, 1e19, -1e300, 1.7976931348623157e308]),
    st.builds(int.__add__, st.sampled_from([2**53, -(2**53), 2**63, -(2**63), 10**18]), st.integers(-3, 3)),
)
_FACTORS = st.sampled_from([1, 2, 7, 0.5, 0.01, 1.3, 0.07, 1000, 65_537, 2**40, 1e-300])


@given(
    kind=st.sampled_from(["integer", "number"]),
    limits=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), _LIMITS, max_size=3
    ),
    factor=st.one_of(st.none(), _FACTORS),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(200))
def test_every_number_keeps_its_bounds(kind: str, limits: dict[str, float], factor: float | None, seed: int) -> None:
    schema = {"type": kind, **limits} | ({} if factor is None else {"multipleOf": factor})
    try:
        grammar = grammars.json_schema(schema)
    except InvalidRequestError:
        assume(False)
    for more in range(4):
        output = walk(grammar, seed + more, most=80)
        assert output is None or keeps(schema, output), (schema, output)


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        ({"minimum": -(2**63), "maximum": MAX_INT64}, [0, MAX_INT64, -(2**63) + 1024], [MAX_INT64 + 1, -(2**63) - 1]),
        ({"minimum": 0, "maximum": MAX_INT64}, [0, MAX_INT64], [-1, MAX_INT64 + 1]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 2**63}, [0, MAX_INT64], [-1, 2**63]),
        ({"minimum": MAX_INT64}, [MAX_INT64], [MAX_INT64 - 1]),
        ({"minimum": 2**53 - 1, "exclusiveMaximum": 2**53 + 1}, [2**53 - 1, 2**53], [2**53 - 2, 2**53 + 1]),
        ({"minimum": 0, "maximum": MAX_INT64, "multipleOf": 1000}, [5000, 0], [5001]),
        ({"minimum": 0.5, "maximum": 2.0}, [1, 2], [0, 3]),
    ],
)  # fmt: skip
def test_bounds_of_integers_are_exact(limits: dict[str, Any], inside: list[int], outside: list[int]) -> None:
    schema = {"type": "integer", **limits}
    assert [number for number in inside if not accepts(schema, str(number))] == []
    assert [number for number in outside if accepts(schema, str(number))] == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
        {"type": "integer", "minimum": 10**18 + 1},
        {"type": "integer", "maximum": -(2**63)},
        {"const": 2**53 + 1},
        {"enum": ["a", -(2**63)]},
        {"const": {"a": [2**64]}},
        {"type": "integer", "allOf": [{"multipleOf": 999_983}, {"multipleOf": 999_979}]},
        {"type": "integer", "multipleOf": 1.3, "minimum": 1, "maximum": 3.9},
        {"type": "number", "minimum": 1e300},
        {"type": "integer", "const": -1e19},  # ended the process
        {"allOf": [{"type": "integer"}, {"const": -1e25}]},
        {"type": "integer", "enum": [1e19, 5]},  # was written as another number
        {"type": "integer", "multipleOf": 999_983},  # took ten seconds
        {"type": "integer", "minimum": True},
        {"maximum": False},
    ],
)
def test_a_number_that_cannot_be_kept_is_refused_with_its_path(part: dict[str, Any]) -> None:
    error = refusal({"type": "object", "properties": {"a/b": {"items": part}}})
    assert error.code == Refusal.UNSUPPORTED
    assert "at /properties/a~1b/items" in error.message


def test_sizes_and_factors_of_any_length_are_refused() -> None:
    assert refusal({"type": "string", "minLength": 10**400}).code == Refusal.TOO_LARGE
    primes = [{"type": "integer", "multipleOf": prime} for prime in (4987, 4973)]
    assert refusal({"prefixItems": primes}).code == Refusal.TOO_LARGE


_CHAIN = {f"a{i}": {"items": {"items": {"items": {"$ref": f"#/$defs/a{i + 1}"}}}} for i in range(2_000)}
DEADLY = {
    "the least number of 64 bits": 'grammars.json_schema({"const": -2**63})',
    "in an enum": 'grammars.json_schema({"enum": [-2**63]})',
    "below it": 'grammars.json_schema({"type": "integer", "minimum": -1e301, "maximum": -1e300})',
    "behind a reference": 'grammars.json_schema({"x": {"const": -2**63}, "$ref": "#/x"})',
    "in rules": """grammars.lark('start: %json {"const": -9223372036854775808}')""",
    "a chain of references": (
        'grammars.json_schema({"$defs": {f"a{i}": {"items": {"items": {"$ref": f"#/$defs/a{i + 1}"}}} '
        'for i in range(3000)} | {"a3000": {}}, "$ref": "#/$defs/a0"})'
    ),
    "a chain of rules": r"""grammars.compose("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000)) """
    r"""+ 'a9000: "x"', {}, param="x")""",
    "a large constant": 'grammars.json_schema({"type": ["integer", "null"], "enum": [-1e300, None]})',
    "a chain of terminals": r"""grammars.compose("start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(9000)) """
    r"""+ 'A9000: "x"', {}, param="x")""",
}


@pytest.mark.parametrize("name", DEADLY)
@pytest.mark.wide
def test_no_grammar_ends_the_process(name: str) -> None:
    """They did: by recursion without end, or deeper than a thread's stack."""
    code = f"""
import threading
from serve_app import grammars
from serve_app.errors import InvalidRequestError
from tests.grammars.test_random_schemas import BYTES
def run():
    try:
        BYTES.matcher({DEADLY[name]}).allowed()
    except InvalidRequestError as error:
        print(error.message[:200])
thread = threading.Thread(target=run)
thread.start()
thread.join()
print("lived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "lived"


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("kind", ["integer", "boolean", "string"])
def test_patterns_that_match_a_declared_property(kind: str, required: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": kind}},
        "additionalProperties": False,
        "patternProperties": {"^score$": {"type": kind}},
    } | ({"required": ["score"]} if required else {})
    whole = {"type": "object", "properties": {"part": schema}, "required": ["part"], "additionalProperties": False}
    if not required:
        error = refusal(whole)
        assert error.code == Refusal.UNSUPPORTED
        assert "at /properties/part: `patternProperties`" in error.message
        return
    for seed in range(30):
        matcher_output = walk(grammars.json_schema(whole), seed, most=400)
        if matcher_output is not None:
            jsonschema.validate(json.loads(matcher_output), whole)
    assert not accepts(whole, '{"part": {"score": 1, ')


INTEGER = {"type": "integer"}
DECLARED: dict[str, Any] = {"properties": {"score": INTEGER}}
ONLY = {"patternProperties": {"^score$": INTEGER}, "additionalProperties": False}
NEEDED = {"required": ["score"]}
JOINED: dict[str, dict[str, Any]] = {
    "allOf": {"allOf": [DECLARED | NEEDED, ONLY]},
    "beside allOf": {**DECLARED, **NEEDED, "allOf": [ONLY]},
    "beside anyOf": {**DECLARED, **NEEDED, "anyOf": [ONLY, {**ONLY, "title": "b"}]},
    "beside oneOf": {**DECLARED, **NEEDED, "oneOf": [ONLY]},
    "beside $ref": {**DECLARED, **NEEDED, "$ref": "#/$defs/only"},
    "two $ref": {"allOf": [{"$ref": "#/$defs/declared"}, {"$ref": "#/$defs/only"}]},
    "required elsewhere": {**DECLARED, "allOf": [NEEDED, ONLY]},
    "not declared": {"allOf": [NEEDED, ONLY]},
    "not required": {"allOf": [DECLARED, ONLY]},
}


@pytest.mark.parametrize("name", JOINED)
def test_patterns_that_match_a_property_of_a_joined_schema(name: str) -> None:
    """Their comma promised a name that was used up."""
    part = {"type": "object", **JOINED[name]}
    shared = {"declared": DECLARED | NEEDED, "only": ONLY}
    error = refusal({"type": "object", "properties": {"part": part}, "$defs": shared})
    assert error.code == Refusal.UNSUPPORTED
    assert "`patternProperties` allows no name" in error.message


def test_patterns_of_joined_schemas_that_leave_names_are_served() -> None:
    open_ended = {"patternProperties": {"^[a-z]+$": INTEGER}, "additionalProperties": False}
    schema = {"type": "object", "allOf": [DECLARED | NEEDED, open_ended]}
    assert accepts(schema, '{"score": 1, "b": 2}')
    assert not accepts(schema, '{"score": 1, "B')


def test_required_properties_that_only_a_pattern_declares() -> None:
    schema = {"type": "object", "patternProperties": {"^(a|b)$": INTEGER}, "additionalProperties": False}
    for required in (["a"], ["a", "b"]):
        part = {**schema, "required": required}
        for seed in range(30):
            output = walk(grammars.json_schema(part), seed, most=400)
            assert output is not None
            jsonschema.validate(json.loads(output), part)


@pytest.mark.parametrize("bounds", [{}, {"maximum": 690_000}, {"minimum": -400_001}, {"minimum": -9, "maximum": 2**52}])
@pytest.mark.parametrize("factors", [[4_999], [71, 67], [9_999], [97, 89]])
def test_a_multiple_is_enforced_to_its_end_or_refused(bounds: dict[str, Any], factors: list[int]) -> None:
    schema = {**INTEGER, **bounds, "allOf": [{"multipleOf": factor} for factor in factors]}
    if math.prod(factors) > MAX_STATES:
        assert refusal(schema).code in (Refusal.UNSUPPORTED, Refusal.TOO_LARGE)
        return
    grammar = grammars.json_schema(schema)
    for seed in range(5):
        matcher, rng = BYTES.matcher(grammar), random.Random(seed)
        for _ in range(40):
            allowed = matcher.allowed()
            assert allowed is not None
            if (chosen := rng.choice(allowed.ids())) == EOS:
                break
            assert matcher.consume([chosen])


@pytest.mark.parametrize(
    ("schema", "code", "said"),
    [
        ({"properties": {"a": {"minLength": 10**6}}}, Refusal.TOO_LARGE, "at /properties/a: `minLength`"),
        ({"items": {"type": "array", "minItems": 1e6}}, Refusal.TOO_LARGE, "at /items: `minItems`"),
        ({"x-guidance": {"lenient": True}, "not": {}}, Refusal.UNSUPPORTED, "x-guidance"),
        ({"type": "object", "minProperties": 3}, Refusal.UNSUPPORTED, "`minProperties`"),
        ({"minimum": float("inf")}, Refusal.UNSUPPORTED, "`minimum`"),
        ({"minimum": 10**5000}, Refusal.INVALID, "digits"),
        ({"const": "\ud800"}, Refusal.INVALID, "hex escape"),
        (
            {"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}, "required": ["l"]}},
             "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "type": "object"},
            Refusal.UNMATCHABLE,
            "at /properties/a",
        ),
    ],
)  # fmt: skip
def test_what_has_no_answer_is_refused_with_its_path(schema: dict[str, Any], code: Refusal, said: str) -> None:
    error = refusal(schema)
    assert error.code == code
    assert said in error.message


_WRONG: dict[str, tuple[Any, ...]] = {
    "type": (5, ["string", 5], {}),
    "format": ([], {}, 5),
    "pattern": (5, []),
    "enum": ("a", {}),
    "$ref": (5, []),
    "$defs": ([], "a"),
    "allOf": (5, {}, [5], [[{}]]),
    "anyOf": (5, {}, ["a"]),
    "oneOf": (5, {}, [None]),
    "items": (5, "a", [5]),
    "prefixItems": ({}, ["a"]),
    "properties": ([], 5, {"b": 5}),
    "patternProperties": ([], 5, {"b": []}),
    "additionalProperties": (5, [], None),
    "required": (5, "a", [["a"]], [5], {}),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), ("5", [], True, None)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("5", [], None)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), ("5", [], True, None, -1, 1.5)),
    **dict.fromkeys(("minProperties", "maxProperties"), ("5", {}, False, None, -1, 1.5)),
}
_FULL: list[dict[str, Any]] = [
    {"type": "string", "format": "byte", "pattern": "a", "allOf": [{"minLength": 1}], "maxLength": 9},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "additionalProperties": False,
     "required": ["a"], "minProperties": 1, "maxProperties": 2},
    {"type": "array", "items": {"type": "integer"}, "prefixItems": [{}], "minItems": 1, "maxItems": 3},
    {"type": "number", "minimum": 1, "exclusiveMaximum": 9, "multipleOf": 2, "enum": [2, 4]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"const": 1}, {"type": "null"}]}}, "$id": "x"},
]  # fmt: skip


@pytest.mark.parametrize(("keyword", "value"), [(key, value) for key, values in _WRONG.items() for value in values])
def test_a_keyword_with_a_value_of_a_wrong_type_is_refused_with_its_path(keyword: str, value: Any) -> None:
    for whole in ({}, *_FULL):
        error = refusal({"properties": {"part": {**whole, keyword: value}}})
        assert error.code == Refusal.UNSUPPORTED
        assert "at /properties/part" in error.message


_ANY_JSON = st.recursive(
    st.sampled_from([None, True, 0, -1, 1.5, 10**400, float("nan"), "a", "(", "byte", "\ud800", "#/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "^a$", "\ud800", *_WRONG]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(
    whole=st.sampled_from([{}, *_FULL]),
    changes=st.dictionaries(
        st.sampled_from([*_WRONG, "const", "$id", "additionalItems", "title"]), _ANY_JSON, max_size=3
    ),
    around=st.sampled_from(["{}", '{"items": {}}', '{"$defs": {"a": {}}, "$ref": "#/$defs/a"}']),
)
@settings(max_examples=examples(500))
def test_no_value_of_a_keyword_is_an_error_of_the_server(whole: Any, changes: Any, around: str) -> None:
    schema = json.loads(around.replace("{}", json.dumps({**whole, **changes})))
    for build in (lambda: grammars.json_schema(schema), lambda: grammars.lark(f"start: %json {json.dumps(schema)}")):
        try:
            build()
        except InvalidRequestError as error:
            error.message.encode()


class Account(BaseModel):
    home: Path
    password: SecretStr
    key: SecretBytes
    picture: bytes
    encoded: Base64Bytes
    balance: Decimal


def test_what_pydantic_writes_is_served() -> None:
    for mode in ("validation", "serialization"):
        schema = Account.model_json_schema(mode=mode)  # type: ignore[arg-type]
        for seed in range(40):
            output = walk(grammars.json_schema(schema), seed, most=800)
            if output is not None:
                jsonschema.validate(json.loads(output), schema)
    whole = {"home": "/tmp", "password": "p", "key": "k", "picture": "b", "encoded": "YQ==", "balance": "1.50"}
    assert accepts(schema, json.dumps(whole))


_HEAD = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS = [
    rf"{_HEAD}\d*\.?\d*$",
    rf"{_HEAD}\d*\.?\d{{0,2}}0*$",
    rf"{_HEAD}\d*\.?\d{{0,0}}0*$",
    rf"{_HEAD}(?:\d{{0,5}}|(?=[\d.]{{1,6}}0*$)\d*\.\d*0*$)",
    rf"{_HEAD}(?:\d{{0,3}}|(?=[\d.]{{1,6}}0*$)\d{{0,3}}\.\d{{0,2}}0*$)",
    rf"{_HEAD}(?:\d{{0,0}}|(?=[\d.]{{1,3}}0*$)\d{{0,0}}\.\d{{0,2}}0*$)",
]
"""As pydantic 2.12 writes them: without limits, with `decimal_places`, `max_digits`, and both."""


@pytest.mark.parametrize("pattern", DECIMALS)
def test_decimals_with_a_look_ahead_are_served(pattern: str) -> None:
    schema = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": pattern}]}
    found = set()
    for seed in range(60):
        output = walk(grammars.json_schema(schema), seed, most=60)
        if output not in (None, "null"):
            text = json.loads(str(output))
            found.add(text)
            assert re.search(pattern, text), text
            Decimal(text)
    assert len(found) > 10


@pytest.mark.parametrize("form", ["byte", "base64", "base64url", "decimal"])
def test_formats_with_a_form(form: str) -> None:
    good = "-12.50" if form == "decimal" else "YWJj" if form != "base64url" else "_-8="
    assert accepts({"type": "string", "format": form}, f'"{good}"')
    assert not accepts({"type": "string", "format": form}, '"a b"')
    assert accepts({"type": "string", "format": form, "pattern": "^.*$"}, f'"{good}"')


@pytest.mark.parametrize("build", [grammars.regex, grammars.lark, lambda text: grammars.choice([text])])
def test_what_is_no_text_is_the_clients_fault(build: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        build("\ud800")
    assert refused.value.code == Refusal.INVALID


_PIECES = [*"ab.()|*+?^${é", "[a-c]", "{3}", "{2,5000}", "\\d", "\\b", "(?="]
_RULES = ["start: ", "a: ", "B: ", '"x"', "/a+/", "%json {}", "<[7]>", *"aB| \n*?~&()"]


@given(
    pieces=st.one_of(
        st.tuples(st.just("regex"), st.lists(st.sampled_from(_PIECES), max_size=12)),
        st.tuples(st.just("lark"), st.lists(st.sampled_from(_RULES), max_size=20)),
        st.tuples(st.just("regex"), st.lists(st.text(max_size=4), max_size=4)),
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(300))
def test_a_text_of_a_client_never_fails_as_an_error_of_the_server(pieces: tuple[str, list[str]], seed: int) -> None:
    kind, parts = pieces
    try:
        grammar = getattr(grammars, kind)("".join(parts))
        walk(grammar, seed, most=100)
    except InvalidRequestError:
        return
    matcher = BYTES.matcher(grammar)
    for _ in range(50):
        allowed = matcher.allowed()
        if not allowed:
            assert isinstance(matcher.failure(), InvalidRequestError)
            return
        token_id = allowed.ids()[-1 - seed % len(allowed.ids())]
        if token_id == EOS:
            return
        if not matcher.consume([token_id]):
            assert isinstance(matcher.failure(), InvalidRequestError)
            return


def test_whose_fault_a_failure_is() -> None:
    wrong = BYTES.matcher(grammars.json_schema({"type": "integer"}))
    assert not wrong.consume(list(b"x"))
    assert isinstance(wrong.failure(), EngineError), "an output that another replica should not have made"
    heavy = BYTES.matcher('{"grammars":[{"lark_grammar":"start: /(?:a?){5000}a{5000}/"}]}')
    assert not heavy.consume(list(b"a"))
    assert heavy.failure().code == Refusal.TOO_LARGE
    dead = BYTES.matcher(grammars.lark('start: "x" | "y" NONE\nNONE: /a/ & /b/'))
    assert dead.consume(list(b"y"))
    assert dead.allowed() is None
    assert dead.failure().code == Refusal.UNMATCHABLE
