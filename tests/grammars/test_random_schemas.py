"""Whatever the schema and whatever the model would rather write: texts that end are JSON that the
schema accepts."""

import json
import random
from contextlib import suppress
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import grammars
from serve_app.errors import InvalidRequestError
from serve_app.grammars import Grammars
from serve_app.grammars.token_set import Vocabulary
from tests.examples import examples
from tests.grammars.schemas import bounded_schemas, instances, schemas

EOS = 256
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])
"""Not `date`: grammars allow 29 February in every year."""
BYTES = Grammars(
    lambda: Vocabulary(TOKENS, frozenset([EOS]), lambda text: list(text.encode())), [EOS], width=len(TOKENS)
)


def walk(grammar: str, seed: int, most: int) -> str | None:
    """A random output, of bytes; None: it did not end, or was too much work. Quotes and brackets
    like to come."""
    matcher, rng = BYTES.matcher(grammar), random.Random(seed)
    output = bytearray()
    for _ in range(most):
        allowed = matcher.allowed()
        if allowed is None:
            return None
        ids = allowed.ids()
        closing = [i for i in ids if i == EOS or i in b'"]}']
        chosen = rng.choice(closing if closing and rng.random() < 0.3 else ids)
        if chosen == EOS:
            return output.decode()
        if not matcher.consume([chosen]):
            return None
        output.append(chosen)
    return None


def validate(schema: dict[str, Any], value: Any) -> None:
    with suppress(RecursionError):  # jsonschema's, where an alternative of a schema is that schema
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


@given(schema=bounded_schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=examples(150))
def test_every_output_of_a_bounded_schema_ends_and_is_valid(schema: dict[str, Any], seed: int) -> None:
    output = walk(grammars.json_schema(schema), seed, most=2000)
    assert output is not None
    validate(schema, json.loads(output))


@given(schema=schemas(), seed=st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_every_output_that_ends_is_valid(schema: dict[str, Any], seed: int) -> None:
    with suppress(InvalidRequestError):  # about every second one cannot be enforced
        output = walk(grammars.json_schema(schema), seed, most=400)
        if output is not None:
            validate(schema, json.loads(output))


@given(data=st.data(), schema=bounded_schemas())
@settings(max_examples=examples(100))
def test_what_a_schema_accepts_can_be_written(data: st.DataObject, schema: dict[str, Any]) -> None:
    text = json.dumps(data.draw(instances(schema)), ensure_ascii=False)
    matcher = BYTES.matcher(grammars.json_schema(schema))
    assert matcher.consume(list(text.encode())), text
    allowed = matcher.allowed()
    assert allowed is not None
    assert EOS in allowed
