"""Grammars: outputs match them, what cannot be enforced is refused by name, and no grammar costs
much."""

import gc
import json
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jsonschema
import psutil
import pytest

from serve_app import grammars
from serve_app.errors import InvalidRequestError
from serve_app.grammars import Grammars, Matcher
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.grammars.grammar_work import MAX_BUILDS, MAX_CHARS, MAX_MASKS, counted
from tests.grammars.hostile_schemas import HOSTILE_SCHEMAS

WIDTH = 49_160
EOS = 2
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "note": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["food", "tools"]},
        "items": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
                    "count": {"type": "integer"},
                },
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "note", "kind", "items"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("default")


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.vocabulary, [EOS], WIDTH)


def walk(matcher: Matcher, rng: random.Random, most: int = 400) -> list[int] | None:
    """A random output; None when it did not end, or the matcher gave up."""
    output: list[int] = []
    for _ in range(most):
        allowed = matcher.allowed()
        if allowed is None:
            return None
        chosen = rng.choice(allowed.ids())
        if chosen == EOS:
            return output
        if not matcher.consume([chosen]):
            assert matcher.error
            return None
        output.append(chosen)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_any_output_that_ends_is_valid(compiled: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    output = walk(compiled.matcher(grammars.json_schema(ORDER)), random.Random(seed))
    assert output is not None
    jsonschema.validate(json.loads(tokenizer.decode(output)), ORDER)


def test_choices_are_exactly_the_texts(compiled: Grammars, tokenizer: Tokenizer) -> None:
    answers = ["yes", "no", 'may"be\n', "naïve 你好"]
    outputs = {
        tokenizer.decode(output)
        for seed in range(60)
        if (output := walk(compiled.matcher(grammars.choice(answers)), random.Random(seed))) is not None
    }
    assert outputs == set(answers)


def test_a_matcher_made_again_from_the_output_is_in_the_same_state(compiled: Grammars) -> None:
    text = grammars.json_schema(ORDER)
    output = walk(compiled.matcher(text), random.Random(7))
    assert output is not None
    following = compiled.matcher(text)
    for count, token_id in enumerate(output):
        again = compiled.matcher(text)
        assert again.consume(output[:count])
        allowed = following.allowed()
        assert allowed
        assert again.allowed() == allowed
        assert following.consume([token_id])
    following.roll_back(len(output) - 3)
    again = compiled.matcher(text)
    again.consume(output[:3])
    assert following.allowed() == again.allowed()


def test_what_must_come_is_told(compiled: Grammars, tokenizer: Tokenizer) -> None:
    matcher = compiled.matcher(grammars.json_schema(ORDER))
    assert tokenizer.decode(matcher.forced()) == '{"id": "'


def test_ids_beyond_the_vocabulary_never_match(compiled: Grammars, tokenizer: Tokenizer) -> None:
    allowed = compiled.matcher(grammars.regex("(?s:.*)")).allowed()
    assert allowed is not None
    assert allowed.bits().shape == (WIDTH,)
    assert max(allowed.ids()) < tokenizer.vocab_size


def test_only_so_many_grammars_are_kept(compiled: Grammars) -> None:
    for number in range(300):
        compiled.matcher(grammars.regex(f"a{{{number}}}b"))
    assert len(compiled._kept._values) == 256
    long = [grammars.choice([f"{number}-{i}" * 1000 for i in range(25)]) for number in range(30)]
    for text in long:
        compiled.matcher(text)
    assert sum(map(len, compiled._kept._values)) == compiled._kept._chars <= 2**22
    assert compiled._kept.get(long[-1]) is not None


@pytest.mark.wide
def test_ten_thousand_schemas_leave_no_memory_behind(compiled: Grammars) -> None:
    """Beyond what the kept ones take."""

    def meet(numbers: range) -> int:
        for number in numbers:
            schema = {"type": "object", "properties": {f"field{number}": {"type": "string", "maxLength": number % 50}}}
            compiled.matcher(grammars.json_schema(schema))
        gc.collect()
        return psutil.Process().memory_info().rss

    before = meet(range(1_000))
    assert meet(range(1_000, 10_000)) - before < 64 * 2**20
    assert len(compiled._kept._values) <= 256


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"properties": {"a": {"items": {"not": {}}}}}, "/properties/a/items", "not"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, "/anyOf/1", "uniqueItems"),
        ({"$defs": {"x": {"format": "moon"}}, "properties": {"b": {"$ref": "#/$defs/x"}}}, "/properties/b", "moon"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "enforced:", "minimum"),
        ({"type": "strin"}, "enforced:", "strin"),
        ({"$ref": "http://elsewhere/x.json"}, "enforced:", "elsewhere"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "enforced:", "oneOf"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_path(schema: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammars.json_schema(schema)
    assert where in refused.value.message
    assert what in refused.value.message
    assert refused.value.param == "response_format"


HOSTILE: dict[str, Callable[[], str]] = {
    **{name: partial(grammars.json_schema, schema) for name, schema in HOSTILE_SCHEMAS.items()},
    "20,000 choices": lambda: grammars.choice([str(i) for i in range(20_000)]),
    "10,000 long choices": lambda: grammars.choice([f"{i}" * 100 for i in range(10_000)]),
    "no choice": lambda: grammars.choice([]),
    "repetition of a repetition": lambda: grammars.regex("(a{1,1000}){1,1000}"),
    "many automata": lambda: grammars.regex("(.{1,500}|[a-z]{1,500}){1,500}x"),
    "stars": lambda: grammars.regex("((a*)*)*b"),
    "exponential 20": lambda: grammars.regex("(a|b)*a(a|b){20}"),
    "far back": lambda: grammars.regex(".*a.{200}b"),
    "look-ahead": lambda: grammars.regex("(?=a)b"),
    "unclosed": lambda: grammars.regex("("),
    "left recursion": lambda: grammars.lark('start: a\na: a b | b\nb: a a | "x" a'),
    "3,000 parentheses": lambda: grammars.lark("start: " + "(" * 3000 + '"a"' + ")" * 3000),
    "nothing, many times": lambda: grammars.lark('start: x*\nx: ""'),
    "500 patternProperties": lambda: grammars.lark(
        "\n".join(["start: a0", *(f'a{i}: %json {{"patternProperties": {{"{i}": {{}}}}}}' for i in range(500))])
    ),
    "30,000 alternatives": lambda: grammars.lark("start: " + " | ".join(f'"w{i}"' for i in range(30_000))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_grammar_takes_much_work(compiled: Grammars, name: str) -> None:
    """Counted in what llguidance has to build, and walked for 200 tokens, each bounded by
    llguidance's own limits."""
    with counted() as work, suppress(InvalidRequestError):
        walk(compiled.matcher(HOSTILE[name]()), random.Random(0), most=200)
    assert work.chars <= MAX_CHARS
    assert work.builds <= MAX_BUILDS
    assert work.masks <= MAX_MASKS


@pytest.mark.parametrize(
    "build",
    [
        lambda: grammars.json_schema({"type": "object", "properties": {"kept": {}}}),
        lambda: grammars.regex("kept [a-z]+"),
        lambda: grammars.lark('start: "kept" %json {"type": "integer"}'),
        lambda: grammars.choice([f"kept {i}" for i in range(1000)]),
    ],
)
def test_what_is_asked_for_again_is_not_built_again(build: Callable[[], str]) -> None:
    first = build()
    with counted() as work:
        assert build() == first
    assert work.builds == 0


def test_the_same_text_means_another_grammar_elsewhere() -> None:
    text = 'start: "a"'
    assert len({grammars.regex(text), grammars.lark(text), grammars.choice([text])}) == 3


def test_too_many_patterns_are_refused_with_the_path() -> None:
    for parts in ([f"a{i}" for i in range(100)], [f"{i}" * 1_000 for i in range(60)]):
        schema: dict[str, Any] = {"items": {"anyOf": [{"patternProperties": {part: {}}} for part in parts]}}
        with pytest.raises(InvalidRequestError) as refused:
            grammars.json_schema(schema)
        assert refused.value.code == "grammar_too_large"
        assert "at /items/anyOf/" in refused.value.message
