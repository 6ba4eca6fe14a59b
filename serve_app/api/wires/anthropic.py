"""POST /v1/messages: Anthropic's messages, whole or streamed."""

import uuid
from typing import Any

import orjson

from serve_app.api.bodies.anthropic import MessagesBody
from serve_app.api.bodies.past_calls import as_json
from serve_app.api.door.errors import anthropic_error_json
from serve_app.api.endpoint import ApiContext
from serve_app.api.generation import Generation, Usage
from serve_app.api.sse import named_event
from serve_app.api.wires.chat import call_name
from serve_app.api.wires.items import ItemWire
from serve_app.api.wires.translation import TranslatedJob
from serve_app.errors import RequestError
from serve_app.text.parts import Kind, Part


class MessagesJob(TranslatedJob):
    """One parsed request for a message."""

    def __init__(self, context: ApiContext, asked: MessagesBody) -> None:
        """Raises as `ChatJob` does."""
        super().__init__(context, asked)
        self.default_max_tokens = self._max_tokens = asked.max_tokens

    def wire(self, generation: Generation) -> "MessagesWire":
        """Return the wire for the answer."""
        return MessagesWire(self.card.name, generation, self.request_id, self._max_tokens)


class MessagesWire(ItemWire):
    """The `message` object and its events."""

    def __init__(self, model: str, generation: Generation, request_id: str, max_tokens: int) -> None:
        """request_id: source of the calls' ids. max_tokens: the requested value."""
        super().__init__()
        self._message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._generation = generation
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._content: list[dict[str, Any]] = []

    def begin(self) -> list[bytes]:
        """Return `message_start`: the message without content, with the prompt's token counts."""
        end = {"stop_reason": None, "stop_sequence": None, "usage": _usage(self._generation.usage)}
        return [_event("message_start", message={**self._message, "content": [], **end})]

    def ping(self) -> bytes:
        """Return the keep-alive: Anthropic's `ping`, or a comment before `message_start`."""
        return _event("ping") if self.begun else super().ping()

    def open_item(self, part: Part) -> list[bytes]:
        """Return `content_block_start`."""
        match part.kind:
            case Kind.CALL:
                call_id = f"toolu_{call_name(self._request_id, 0, part.call)}"
                block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": part.text, "input": {}}
            case Kind.REASONING:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "text", "text": ""}
        self._content.append(block)
        return [_event("content_block_start", index=len(self._content) - 1, content_block=block)]

    def grow(self, part: Part) -> bytes:
        """Return `content_block_delta`."""
        match part.kind:
            case Kind.ARGUMENTS:
                delta = {"type": "input_json_delta", "partial_json": part.text}
            case Kind.REASONING:
                delta = {"type": "thinking_delta", "thinking": part.text}
            case _:
                delta = {"type": "text_delta", "text": part.text}
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def close_item(self, kind: Kind, text: str, *, cut: bool) -> list[bytes]:
        """Return `content_block_stop`."""
        block = self._content[-1]
        match kind:
            case Kind.CALL:
                block["input"] = orjson.Fragment(as_json(text))
            case Kind.REASONING:
                block["thinking"] = text
            case _:
                block["text"] = text
        return [_event("content_block_stop", index=len(self._content) - 1)]

    def end(self, usage: Usage) -> bytes:
        """Return `message_delta` with the stop reason and the usage, and `message_stop`."""
        return _event("message_delta", delta=self._end(usage), usage=_usage(usage)) + _event("message_stop")

    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the error event."""
        return named_event("error", anthropic_error_json(error, request_id))

    def answer(self, usage: Usage) -> dict[str, Any]:
        """Return the whole message."""
        return {**self._message, "content": self._content, **self._end(usage), "usage": _usage(usage)}

    def _end(self, usage: Usage) -> dict[str, Any]:
        return {"stop_reason": self._stop_reason(usage), "stop_sequence": self.stop_string}

    def _stop_reason(self, usage: Usage) -> str:
        if self.is_cut:
            return "max_tokens" if usage.completion_tokens >= self._max_tokens else "model_context_window_exceeded"
        if self.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self.num_calls else "end_turn"


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's `usage`, whose `input_tokens` exclude cached tokens."""
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))
