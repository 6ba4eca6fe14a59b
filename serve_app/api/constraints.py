"""Builds an answer's grammar from `response_format`, `structured_outputs` and tools.

Decides which fields of a request constrain the answer. `grammars` decides what can be enforced.
"""

import asyncio
import time
from functools import partial

from serve_app import grammars
from serve_app.api.bodies.schemas import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
from serve_app.api.request_events import RequestObserver
from serve_app.errors import InvalidRequestError
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_format import Thinking
from serve_app.text.tool_grammar import Calls, message_grammar


async def grammar_of(
    body: GenerationBody,
    tokenizer: Tokenizer,
    observer: RequestObserver,
    calls: Calls | None = None,
    thinking: Thinking | None = None,
    *,
    bounded: bool = False,
) -> str | None:
    """Return the grammar that the answer must follow, or None for free text.

    The answer may be `calls` instead, and may begin with `thinking`. bounded: the reasoning has a
    budget.
    Raises `InvalidRequestError` naming the field, the keyword and its path if it cannot be
    enforced.
    """
    if body.answers_with_odds and (calls is not None or thinking is not None):
        raise InvalidRequestError(
            "`structured_outputs.odds` cannot be combined with tools or reasoning",
            param="structured_outputs.odds",
        )
    build = _builder(body)
    if build is None and calls is None and (thinking is None or not bounded):
        return None
    # In a thread: it takes about 1 ms, and up to 500 ms for the worst grammars.
    began = time.monotonic()
    try:
        text = await asyncio.to_thread(_build, build, tokenizer, calls, thinking)
    except InvalidRequestError as error:
        observer.grammar_refused(error.code or grammars.Refusal.UNSUPPORTED)
        raise
    observer.grammar_built(time.monotonic() - began)
    return text


def _builder(body: GenerationBody) -> partial[str] | None:
    response_format = body.response_format if isinstance(body, ChatBody) else None
    if response_format is not None and response_format.type != "text":
        if body.structured_outputs is not None:
            raise InvalidRequestError(
                "`structured_outputs` and `response_format` both constrain the answer; send only one of them",
                param="structured_outputs",
            )
        return partial(_response_format, response_format)
    return None if body.structured_outputs is None else partial(_structured_outputs, body.structured_outputs)


def _build(
    build: partial[str] | None,
    tokenizer: Tokenizer,
    calls: Calls | None,
    thinking: Thinking | None,
) -> str:
    answer = None if build is None else build()
    if calls is None and thinking is None and answer is not None:
        text = answer
    else:
        text = message_grammar(calls, answer, thinking, tokenizer.special_ids)
    tokenizer.grammars.matcher(text)  # some errors appear only with the first mask
    return text


def _response_format(wanted: ResponseFormat) -> str:
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        return grammars.json_object()
    return grammars.json_schema(schema, param="response_format.json_schema.schema")


def _structured_outputs(wanted: StructuredOutputs) -> str:
    field = "structured_outputs"
    if wanted.json_ is not None:
        return grammars.json_schema(wanted.json_, param=f"{field}.json")
    if wanted.regex is not None:
        return grammars.regex(wanted.regex, param=f"{field}.regex")
    if wanted.choice is not None:
        return grammars.choice(wanted.choice, param=f"{field}.choice")
    if wanted.grammar is not None:
        return grammars.lark(wanted.grammar, param=f"{field}.grammar")
    return grammars.json_object(param=f"{field}.json_object")
