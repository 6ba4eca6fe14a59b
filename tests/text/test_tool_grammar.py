"""What the grammar of tools lets a model write: random tokens are calls that validate, in every
form of calls."""

import json
import random
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from serve_app import grammars
from serve_app.errors import InvalidRequestError
from serve_app.grammars import Grammars, Matcher
from serve_app.grammars.token_set import Vocabulary
from serve_app.text.message_parser import Kind, MessageParser
from serve_app.text.tool_format import Thinking
from serve_app.text.tool_grammar import CallableTool, Calls, message_grammar
from tests.grammars.grammar_work import MAX_BUILDS, MAX_CHARS, counted
from tests.grammars.hostile_schemas import HOSTILE_SCHEMAS
from tests.text.formats import FAMILIES, tokenizer_of
from tests.text.test_message_parser import form_of, message_of, written

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "units": {"enum": ["metric", "imperial"], "type": "string"},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "fast": {"type": "boolean"},
        "why": {"type": "string", "maxLength": 6},
    },
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 9},
                "name": {"type": "string", "maxLength": 4},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
STOP: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "move": MOVE, "stop": STOP}
# A token per byte, and the markers that are special tokens in models: masks of few tokens are
# quick.
SPECIAL = ["<eos>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "</think>"]
EOS = 256
TOKENS = [bytes([byte]) for byte in range(256)] + [token.encode() for token in SPECIAL]
SPECIAL_IDS = {"gemma4": {token: EOS + i for i, token in enumerate(SPECIAL[:6])}, "qwen3": {"</think>": EOS + 6}}


def encode(family: str, text: str) -> list[int]:
    special = SPECIAL_IDS.get(family, {})
    parts = re.split(f"({'|'.join(map(re.escape, special)) or '(?!)'})", text)
    return [i for part in parts for i in ([special[part]] if part in special else part.encode())]


@cache
def compiled(family: str, *, close: str = "") -> Grammars:
    """close: the mark of the family that texts must be encoded with."""
    special = frozenset(range(EOS, len(TOKENS)))
    of = family if close else ""
    return Grammars(lambda: Vocabulary(TOKENS, special, lambda text: encode(of, text)), [EOS], len(TOKENS))


def grammar(
    family: str, names: list[str], *, required: bool, several: bool = False, enforced: bool = True, **how: Any
) -> str:
    tools = [CallableTool(name, SCHEMAS[name] if enforced else None, f"tools[{i}]") for i, name in enumerate(names)]
    calls = Calls(form_of(family), tools, required, several)
    return message_grammar(calls, how.get("answer"), how.get("thinking"), SPECIAL_IDS.get(family, {}))


def walk(family: str, matcher: Matcher, rng: random.Random, most: int = 600) -> str | None:
    """A random output; None if it did not end."""
    output: list[int] = []
    while len(output) < most:
        forced = matcher.forced()
        assert matcher.consume(forced)
        output += forced
        allowed = matcher.allowed()
        assert allowed is not None, matcher.error
        chosen = int(rng.choice(allowed.ids()))
        if chosen == EOS:
            return b"".join(TOKENS[token_id] for token_id in output).decode()
        assert matcher.consume([chosen])
        output.append(chosen)
    return None


def calls_of(family: str, text: str) -> list[tuple[str, Any]]:
    parser = MessageParser(form_of(family), SCHEMAS)
    message = message_of(parser.feed(text) + parser.finish())
    assert Kind.CONTENT not in message, text
    return [(name, json.loads(told)) for name, told in message["calls"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_of_random_tokens_validate(family: str) -> None:
    """167 times six families: a thousand of a thousand, every second one of a named tool."""
    texts = [grammar(family, names, required=True) for names in (list(SCHEMAS), ["weather"])]
    for seed in range(167):
        output = walk(family, compiled(family).matcher(texts[seed % 2]), random.Random(seed))
        assert output is not None
        [(name, arguments)] = calls_of(family, output)
        jsonschema.validate(arguments, SCHEMAS[name])
        assert name == "weather" or seed % 2 == 0


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama3_1"}))
def test_parallel_calls_are_several_where_the_model_writes_several(family: str) -> None:
    text = grammar(family, list(SCHEMAS), required=True, several=True)
    outputs = [walk(family, compiled(family).matcher(text), random.Random(seed), 2000) for seed in range(20)]
    numbers = [len(calls_of(family, output)) for output in outputs if output is not None]
    assert max(numbers) > 1


def follow(family: str, text: str, output: str) -> tuple[bool, bool]:
    """(whether the grammar lets the model write this output, whether it may end there)."""
    matcher = compiled(family).matcher(text)
    if not all(matcher.consume([token_id]) for token_id in encode(family, output)):
        return False, False
    allowed = matcher.allowed()
    assert allowed is not None
    return True, EOS in allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_may_write_if_it_likes(family: str) -> None:
    form = form_of(family)
    text = grammar(family, list(SCHEMAS), required=False, several=True, enforced=False)
    call = written(form, "weather", {"city": "Rome", "anything": [1, {"a": None}]})
    assert follow(family, text, "The sky <is> blue.\n") == (True, True)
    assert follow(family, text, call) == (True, True)
    assert follow(family, text, call[:-3])[1] is False
    assert follow(family, text, written(form, "weather", {})) == (True, True)
    assert follow(family, text, f"{form.begin}sing{form.middle}")[0] is False
    assert follow(family, text, f"{call} and so on")[0] is False
    if form.separator is not None:
        assert follow(family, text, f"Let me see.\n{call}{form.separator}{call}") == (True, True)
    else:
        assert follow(family, text, call + call)[0] is False


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_leave_no_room_for_text(family: str) -> None:
    form = form_of(family)
    call = written(form, "weather", {"city": "Rome", "days": 3})
    text = grammar(family, ["weather"], required=True)
    assert follow(family, text, call) == (True, True)
    assert follow(family, text, f"Well, {call}")[0] is False
    assert follow(family, text, call + (form.separator or "") + call)[0] is False
    assert follow(family, text, written(form, "weather", {"city": "Rome", "days": 300}))[0] is False
    assert follow(family, text, written(form, "move", {"to": None}))[0] is False


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_in_a_form_of_its_own_or_a_call(family: str) -> None:
    answer = grammars.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    text = grammar(family, ["weather"], required=False, answer=answer)
    assert follow(family, text, '{"ok": true}') == (True, True)
    assert follow(family, text, written(form_of(family), "weather", {"city": "Rome", "days": 3})) == (True, True)
    assert follow(family, text, "Well")[0] is False


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "gemma4"])
@pytest.mark.parametrize("begun", [True, False])
def test_constraints_begin_after_the_reasoning(family: str, begun: bool) -> None:
    reasoning = tokenizer_of(family).reasoning
    assert reasoning is not None
    thought = f"{'' if begun else reasoning.open}\nHm. {{\n{reasoning.close}\n\n"
    thinking = Thinking(reasoning, begun)
    call = written(form_of(family), "weather", {"city": "Rome", "days": 3})
    text = grammar(family, ["weather"], required=True, thinking=thinking)
    assert follow(family, text, thought + call) == (True, True)
    assert follow(family, text, f"{thought}Well")[0] is False
    assert follow(family, text, call)[1] is not begun
    answer = message_grammar(None, grammars.json_object(), thinking, SPECIAL_IDS.get(family, {}))
    assert follow(family, answer, thought + '{"a": 1}') == (True, True)
    assert follow(family, answer, f"{thought}Well")[0] is False


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "gemma4"])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("free", [True, False])
def test_a_reasoning_ends_when_its_budget_is_used_up(family: str, begun: bool, free: bool) -> None:
    """In time (up to 3 bytes finish a character), once, and what follows is as it should be."""
    reasoning = tokenizer_of(family).reasoning
    assert reasoning is not None
    special = SPECIAL_IDS.get(family, {})
    answer = None if free else grammars.json_schema({"enum": ["yes", "no"]})
    cut = 0
    for seed in range(60):
        budget, rng = seed % 12, random.Random(seed)
        text = message_grammar(None, answer, Thinking(reasoning, begun), special)
        bounded = Thinking(reasoning, begun).bounded(budget)
        matcher = compiled(family, close=reasoning.close).matcher(text, bounded)
        output = [] if begun else encode(family, reasoning.open)
        assert matcher.consume(output)
        for _ in range(40 + len(reasoning.close)):
            forced = matcher.forced()
            assert follow_and_back(matcher, forced)
            allowed = matcher.allowed()
            assert allowed is not None, matcher.error
            chosen = int(rng.choice(allowed.ids()))
            if chosen == EOS:
                break
            assert follow_and_back(matcher, [chosen])
            assert matcher.consume([chosen])
            output.append(chosen)
        written = b"".join(TOKENS[token_id] for token_id in output).decode(errors="ignore")
        thought, close, rest = written.removeprefix("" if begun else reasoning.open).partition(reasoning.close)
        if close:
            assert len(thought.encode()) <= budget + 3
            cut += len(thought.encode()) >= budget
            assert free or '"yes"'.startswith(rest.strip()) or '"no"'.startswith(rest.strip())
        # Another replica that gets the output so far goes on alike.
        again = compiled(family, close=reasoning.close).matcher(text, bounded)
        assert again.consume(output)
        assert again.allowed() == matcher.allowed()
    assert cut > 30


def _hostile(schema: dict[str, Any], number: int = 1) -> Calls:
    tools = [CallableTool(f"f{i}", {"type": "object", **schema}, f"tools[{i}]") for i in range(number)]
    return Calls(form_of("hermes"), tools, required=True, several=True)


HOSTILE: dict[str, Calls] = {
    **{name: _hostile({"properties": {"a": schema}, "required": ["a"]}) for name, schema in HOSTILE_SCHEMAS.items()},
    "128 tools of 30 fields": _hostile({"properties": {f"k{i}": {"type": "string"} for i in range(30)}}, 128),
    "as many tools with patterns as a request may hold": _hostile(
        {"properties": {"a": {"anyOf": HOSTILE_SCHEMAS["200 anyOf with patterns"]["anyOf"][:15]}}}, 128
    ),
    "marks in texts": _hostile({"properties": {"a": {"enum": ["</tool_call>", '"}}\n<tool_call>', "<|im_end|>"]}}}),
    "marks in names": _hostile(
        {
            "properties": {"</parameter>\n": {"type": "string"}, '<|"|>': {"type": "string"}},
            "required": ["</parameter>\n"],
        }
    ),
    "names of 10,000 letters": _hostile({"properties": {"x" * 10_000: {"type": "string"}}, "required": ["x" * 10_000]}),
    "an impossible field": _hostile({"properties": {"a": {"enum": []}}, "required": ["a"]}),
    "fields in a list": _hostile({"properties": [1, 2]}),
    "a number required": _hostile({"required": 7}),
    "a field that is no schema": _hostile({"properties": {"a": 7}}),
    "alternatives that are none": _hostile({"properties": {"a": {"anyOf": 7}}}),
    "a pattern for a length": _hostile({"properties": {"a": {"type": "string", "maxLength": "}/ b: /"}}}),
    "definitions in a list": _hostile({"$defs": [1], "properties": {"a": {"$ref": "#/$defs/b"}}}),
    "additional ones by pattern": _hostile({"patternProperties": {"(a|b)*a(a|b){20}": {"type": "integer"}}}),
    "a field that refers to all": _hostile({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.wide
def test_no_tool_takes_much_work(family: str, name: str) -> None:
    """Counted in what llguidance has to build, and walked for 200 tokens, each bounded by
    llguidance's own limits."""
    calls = replace(HOSTILE[name], form=form_of(family))
    with counted() as work, suppress(InvalidRequestError):
        matcher = compiled(family).matcher(message_grammar(calls, None, None, SPECIAL_IDS.get(family, {})))
        rng = random.Random(0)
        for _ in range(200):
            allowed = matcher.allowed()
            if allowed is None or not matcher.consume([int(rng.choice(allowed.ids()))]):
                break
    assert work.chars <= MAX_CHARS
    assert work.builds <= MAX_BUILDS


def follow_and_back(matcher: Matcher, token_ids: list[int]) -> bool:
    """Take tokens in and forget them, as drafts are; whether nothing is left of them."""
    before = matcher.allowed()
    if not matcher.consume(token_ids):
        return False
    matcher.roll_back(len(token_ids))
    return before is not None and matcher.allowed() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(family: str) -> None:
    for schema in ({"type": "object", "properties": {"a": {"not": {}}}}, {"type": "object", "if": {}}):
        tools = [CallableTool("f", schema, "tools[0].function.parameters")]
        with pytest.raises(InvalidRequestError, match="cannot be enforced") as refused:
            message_grammar(Calls(form_of(family), tools, True, False), None, None, SPECIAL_IDS.get(family, {}))
        assert refused.value.param == "tools[0].function.parameters"


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
        "below": {"type": "object", "properties": {"first": {"$ref": "#"}}, "additionalProperties": False},
    },
    "required": ["size"],
    "additionalProperties": False,
}
SHADOWED: dict[str, Any] = {
    "type": "object",
    "$defs": {"one": {"enum": [1]}},
    "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/one"}, "$defs": {"one": {"enum": [2]}}}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [(TREE, {"size": 1, "below": {"first": {"size": 3}}}, {"size": 1, "below": {"first": {}}}),
     (SHADOWED, {"a": [1]}, {"a": [2]})],
    ids=["to the whole", "to definitions"],
)  # fmt: skip
def test_references_mean_what_they_mean_in_the_whole_schema(
    family: str, schema: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    calls = Calls(form_of(family), [CallableTool("f", schema, "tools[0]")], required=True, several=False)
    if family == "gemma4" or (family == "qwen3_5_think" and schema is TREE):
        with pytest.raises(InvalidRequestError, match="cannot be enforced at /properties/"):
            message_grammar(calls, None, None, SPECIAL_IDS.get(family, {}))
        return
    text = message_grammar(calls, None, None, SPECIAL_IDS.get(family, {}))
    jsonschema.validate(right, schema)
    assert follow(family, text, written(form_of(family), "f", right)) == (True, True)
    assert follow(family, text, written(form_of(family), "f", wrong))[0] is False
