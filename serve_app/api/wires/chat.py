"""POST /v1/chat/completions: messages in, OpenAI's chat formats out."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from serve_app.api.bodies.schemas import ChatBody
from serve_app.api.bodies.template import CallableTools, template_variables
from serve_app.api.constraints import grammar_of
from serve_app.api.door.errors import error_json
from serve_app.api.endpoint import ApiContext, Choice, Wire
from serve_app.api.generation import Generation, Usage, chunk_usage
from serve_app.api.prepare import (
    answer_head,
    bad_words,
    check_model,
    check_prompt_logprobs,
    check_sequences,
    encode_messages,
    engine_request,
    stop_config,
    truncated,
)
from serve_app.api.sse import PING, ChunkTemplate, ChunkUsage
from serve_app.api.wires.details import LOWEST_LOGPROB, Details
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.errors import RequestError
from serve_app.text.parts import Kind, Part
from serve_app.text.stream import TextPiece, TokenText
from serve_app.text.tool_format import Thinking

_FIELDS = {Kind.CONTENT: "content", Kind.REASONING: "reasoning_content"}


class ChatJob:
    """One parsed chat request."""

    num_prompts = 1
    default_max_tokens: int | None = None
    """Default length of the answer; None is the rest of the context."""

    def __init__(self, context: ApiContext, body: ChatBody) -> None:
        """Raises `InvalidRequestError`, `ModelNotFoundError`, `UnavailableError`."""
        self.body = body
        self._context = context
        self.card = context.service.model
        check_model(self.body.model, self.card)
        check_sequences(1, self.body, context.limits)
        self.stream = bool(self.body.stream)
        self._tokenizer = context.service.tokenizer
        self._called = CallableTools.of(self.body, self._tokenizer)
        self._thinking: Thinking | None = None
        self.request_id = ""
        self.stop = replace(stop_config(self.body), markers=self._markers())
        if self._called is not None:
            self.stop = replace(self.stop, tools=self._called.calls.form, parameters=self._called.parameters)

    async def prompt(self, cache_salt: str | None = None) -> list[int]:
        """Render and tokenize. Raises `InvalidRequestError`.

        cache_salt: the scope for `Tokenizer.encode`.
        """
        tools = self.body.tools or () if self._called is not None else ()
        variables = template_variables(self.body, self._tokenizer)
        messages, ending = self.body.messages, self.body.ending
        token_ids = await encode_messages(self._tokenizer, messages, self.card, tools, variables, ending, cache_salt)
        return truncated(token_ids, self.body, self.card)

    async def engine_requests(self, cache_salt: str) -> list[EngineRequest]:
        """Render, tokenize and validate. Raises `InvalidRequestError`."""
        body = self.body
        token_ids = await self.prompt(cache_salt)
        self._thinking = self._tokenizer.thinking_after(token_ids)
        self.stop = replace(self.stop, thinking=self._thinking)
        asked = ("max_tokens", body.max_tokens)
        if body.max_completion_tokens is not None:
            asked = ("max_completion_tokens", body.max_completion_tokens)
        if body.scores_only:
            asked = (asked[0], 1)
        if body.prompt_logprobs is not None:
            check_prompt_logprobs("prompt_logprobs", len(token_ids), body.prompt_logprobs, self._context.limits)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        calls = None if self._called is None else self._called.calls
        thinking, most = self._thinking, body.thinking_token_budget
        grammar = await grammar_of(
            body, self._tokenizer, self._context.observer, calls, thinking, bounded=most is not None
        )
        request = engine_request(
            body,
            token_ids,
            self.card,
            prompt_field="messages",
            max_tokens=asked,
            default_max_tokens=self.default_max_tokens,
            logprobs=logprobs,
            max_logprobs=self._context.limits.max_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            bad_words=bad_words(body, self._tokenizer),
            grammar=grammar,
            thinking_budget=None if thinking is None or most is None else thinking.bounded(most),
            cache_salt=cache_salt,
        )
        self.request_id = request.request_id
        return [request]

    def wire(self, generation: Generation) -> Wire:
        """Return the wire for the answer."""
        head = answer_head("chatcmpl", "chat.completion.chunk" if self.stream else "chat.completion", self.card)
        usage = chunk_usage(self.body, generation)
        details = Details(self.body, generation, self._tokenizer)
        with_logprobs = bool(self.body.logprobs)
        if self._called is None and self._thinking is None:
            return ChatWire(head, details, with_logprobs=with_logprobs, usage=usage)
        return MessageWire(head, details, self.request_id, with_logprobs=with_logprobs, usage=usage)

    def _markers(self) -> str:
        """The texts that the parser searches for."""
        reasoning = self._tokenizer.reasoning
        markers = [] if reasoning is None else [reasoning.open, reasoning.close]
        return "\n".join(markers if self._called is None else [*markers, self._called.calls.form.markers])


class ChatWire:
    """OpenAI's `chat.completion` and `chat.completion.chunk`, for text only."""

    first_delta = b'"delta":{"role":"assistant","content":""}'

    def __init__(self, head: dict[str, Any], details: Details, *, with_logprobs: bool, usage: ChunkUsage) -> None:
        self._head = head
        self._details = details
        self._with_logprobs = with_logprobs
        self._template = ChunkTemplate(head, usage)

    def start(self, index: int) -> bytes:
        """Return the chunk with the role."""
        return self._template.chunk(index, self.first_delta, None, None, of_chunk=self._details.of_prompt_json(0))

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """Return the chunks for a piece: deltas, then the finish reason."""
        if not (piece.parts or piece.logprobs or piece.finish_reason or self._details.has_ids(piece)):
            return b""
        details = self._details.of_piece(piece)
        deltas = self.deltas(index, piece) or [b"{}"]
        logprobs = _content([entry(t) for t in piece.logprobs]) if self._with_logprobs and piece.logprobs else None
        reason = self.finish_reason(piece.finish_reason, called=piece.called)
        if len(deltas) == 1:
            return self._template.chunk(index, b'"delta":%b' % deltas[0], logprobs, reason, details)
        chunks = [self._template.chunk(index, b'"delta":%b' % delta, None, None) for delta in deltas[1:-1]]
        first = self._template.chunk(index, b'"delta":%b' % deltas[0], logprobs, None)
        last = self._template.chunk(index, b'"delta":%b' % deltas[-1], None, reason, details)
        return b"".join([first, *chunks, last])

    def deltas(self, index: int, piece: TextPiece) -> list[bytes]:
        """Return the piece's parts as deltas of the message."""
        return [b'{"content":%b}' % orjson.dumps(part.text) for part in piece.parts]

    def finish_reason(self, reason: str | None, *, called: bool) -> str | None:
        """Return OpenAI's finish reason.

        An answer that stopped by itself after calls has `tool_calls`.
        """
        return "tool_calls" if reason == FinishReason.STOP and called else reason

    def ping(self) -> bytes:
        """Return the keep-alive: a comment."""
        return PING

    def end(self, usage: Usage) -> bytes:
        """Return the usage if requested, and `[DONE]`."""
        return self._template.end(usage.to_json())

    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the error event."""
        return self._template.error(error_json(error, request_id))

    def token(self, index: int, token: TokenText) -> orjson.Fragment:
        """Return one entry of `content`."""
        return orjson.Fragment(orjson.dumps(entry(token)))

    def message(self, choice: Choice) -> tuple[dict[str, Any], str]:
        """Return (message, finish reason) of a whole choice."""
        return {"role": "assistant", "content": choice.text, "refusal": None}, choice.finish_reason

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return a `chat.completion`."""
        entries = [self._whole_choice(choice) for choice in choices]
        return {**self._head, "choices": entries, "usage": usage.to_json(), **self._details.of_prompt(0)}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message, finish_reason = self.message(choice)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": _content(choice.logprobs) if self._with_logprobs else None,
            "finish_reason": finish_reason,
            **self._details.of_choice(choice),
        }


class MessageWire(ChatWire):
    """A `ChatWire` for messages that may contain reasoning and tool calls."""

    first_delta = b'"delta":{"role":"assistant","content":null}'

    def __init__(
        self, head: dict[str, Any], details: Details, request_id: str, *, with_logprobs: bool, usage: ChunkUsage
    ) -> None:
        """request_id: the calls' ids derive from it, so they are equal in all events."""
        super().__init__(head, details, with_logprobs=with_logprobs, usage=usage)
        self._request_id = request_id

    def deltas(self, index: int, piece: TextPiece) -> list[bytes]:
        """Return the piece's parts as deltas of the message."""
        return [orjson.dumps(self._delta(index, part)) for part in piece.parts]

    def message(self, choice: Choice) -> tuple[dict[str, Any], str]:
        """Return (message, finish reason), equal to the sum of the stream's deltas."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        calls: list[dict[str, Any]] = []
        for part in choice.parts:
            if part.kind is Kind.CALL:
                calls.append(self._call(choice.index, part))
            elif part.kind is Kind.ARGUMENTS:
                calls[part.call]["function"]["arguments"] += part.text
            else:
                message[_FIELDS[part.kind]] = (message.get(_FIELDS[part.kind]) or "") + part.text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        return message, self.finish_reason(choice.finish_reason, called=choice.called) or ""

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if part.kind is Kind.CALL:
            return {"tool_calls": [{"index": part.call, **self._call(index, part)}]}
        if part.kind is Kind.ARGUMENTS:
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
        return {_FIELDS[part.kind]: part.text}

    def _call(self, index: int, part: Part) -> dict[str, Any]:
        name = call_name(self._request_id, index, part.call)
        return {"id": f"call_{name}", "type": "function", "function": {"name": part.text, "arguments": ""}}


def call_name(request_id: str, index: int, call: int) -> str:
    """Return an id unique to this call of this choice, always the same for the same arguments."""
    return hashlib.sha256(f"{request_id} {index} {call}".encode()).hexdigest()[:24]


def _content(entries: Sequence[Any]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def entry(token: TokenText) -> dict[str, Any]:
    """Return OpenAI's object for a token's log-probability and alternatives."""
    return {**_token(token.data, token.logprob), "top_logprobs": [_token(data, p) for data, p in token.top]}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": max(logprob, LOWEST_LOGPROB)}
