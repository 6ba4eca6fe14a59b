"""POST /v1/chat/completions: messages in, OpenAI's chat formats out."""

from collections.abc import Sequence
from typing import Any

import orjson

from serve_app.api.constraints import grammar_of
from serve_app.api.endpoint import ApiContext, Choice
from serve_app.api.generation import Generation, chunk_usage
from serve_app.api.prepare import (
    answer_head,
    check_model,
    check_sequences,
    encode_messages,
    engine_request,
    stop_config,
)
from serve_app.api.schemas import ChatBody, parse_body
from serve_app.api.sse import ChunkTemplate, ChunkUsage
from serve_app.core.request import EngineRequest
from serve_app.text.stream import TextPiece, TokenText

LOWEST_LOGPROB = -9999.0
"""What OpenAI sends for a token that is all but impossible; JSON has no infinity."""


class ChatJob:
    """One parsed chat request."""

    num_prompts = 1

    def __init__(self, context: ApiContext, raw: bytes) -> None:
        """Raises `InvalidRequestError`, `ModelNotFoundError`, `UnavailableError`."""
        self.body = parse_body(ChatBody, raw)
        self._context = context
        self._card = context.service.model
        check_model(self.body.model, self._card)
        check_sequences(1, self.body, context.limits)
        self.stream = bool(self.body.stream)
        self.stop = stop_config(self.body)

    async def engine_requests(self) -> list[EngineRequest]:
        """Render, tokenize, validate."""
        body = self.body
        token_ids = await encode_messages(self._context.service.tokenizer, body.messages, self._card)
        asked = ("max_tokens", body.max_tokens)
        if body.max_completion_tokens is not None:
            asked = ("max_completion_tokens", body.max_completion_tokens)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = await grammar_of(body, self._context.service.tokenizer)
        request = engine_request(
            body,
            token_ids,
            self._card,
            prompt_field="messages",
            max_tokens=asked,
            logprobs=logprobs,
            max_logprobs=self._context.limits.max_logprobs,
            grammar=grammar,
        )
        return [request]

    def wire(self, generation: Generation) -> "ChatWire":
        """The answer's formats."""
        head = answer_head("chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion", self._card)
        return ChatWire(head, with_logprobs=bool(self.body.logprobs), usage=chunk_usage(self.body, generation))


class ChatWire:
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: dict[str, Any], *, with_logprobs: bool, usage: ChunkUsage) -> None:
        self._head = head
        self._with_logprobs = with_logprobs
        self._template = ChunkTemplate(head, usage)

    def start(self, index: int) -> bytes:
        """The chunk that says who speaks."""
        return self._template.chunk(index, b'"delta":{"role":"assistant","content":""}', None, None)

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """A delta of content, the finish reason, or both."""
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return b""
        delta = b'"delta":{"content":%b}' % orjson.dumps(piece.text) if piece.text else b'"delta":{}'
        logprobs = _content([_entry(t) for t in piece.logprobs]) if self._with_logprobs and piece.logprobs else None
        return self._template.chunk(index, delta, logprobs, piece.finish_reason)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage event."""
        return self._template.usage(usage)

    def token(self, index: int, token: TokenText) -> orjson.Fragment:
        """One entry of `content`."""
        return orjson.Fragment(orjson.dumps(_entry(token)))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """A `chat.completion`."""
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": _content(choice.logprobs) if self._with_logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage,
        }


def _content(entries: Sequence[Any]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def _entry(token: TokenText) -> dict[str, Any]:
    return {**_token(token.data, token.logprob), "top_logprobs": [_token(data, p) for data, p in token.top]}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": max(logprob, LOWEST_LOGPROB)}
