"""From `response_format` and `structured_outputs` to the grammar of the answer.

Decides which of a request's fields constrain it. What a grammar can enforce is for `grammars` to say.
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
    budget: int | None = None,
) -> str | None:
    """The grammar that the answer must follow; None if it may be anything.

    `calls` may stand in its place, `thinking` of at most `budget` tokens before it. Raises `InvalidRequestError` naming
    the field, the keyword and its path, for what cannot be enforced.
    """
    if body.answers_with_odds and (calls is not None or thinking is not None):
        raise InvalidRequestError(
            "`structured_outputs.odds` are those of an answer alone, without tools or reasoning in front of it",
            param="structured_outputs.odds",
        )
    build = _builder(body)
    if build is None and calls is None and (thinking is None or budget is None):
        return None
    # Beside the event loop: it takes about a millisecond, and up to half a second for the worst of grammars.
    began = time.monotonic()
    try:
        text = await asyncio.to_thread(_build, build, tokenizer, calls, thinking, budget)
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
                "`structured_outputs` and `response_format` both constrain the answer: give one of them",
                param="structured_outputs",
            )
        return partial(_response_format, response_format)
    return None if body.structured_outputs is None else partial(_structured_outputs, body.structured_outputs)


def _build(
    build: partial[str] | None,
    tokenizer: Tokenizer,
    calls: Calls | None,
    thinking: Thinking | None,
    budget: int | None,
) -> str:
    answer = None if build is None else build()
    if calls is None and thinking is None and answer is not None:
        text = answer
    else:
        text = message_grammar(calls, answer, thinking, tokenizer.special_ids, budget)
    tokenizer.grammars.matcher(text)  # finds what only the first mask shows
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
