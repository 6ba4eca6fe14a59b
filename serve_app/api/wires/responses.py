"""POST /v1/responses: OpenAI's responses, whole or streamed. Responses are not stored."""

import json
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from serve_app.api.bodies.responses import ResponsesBody
from serve_app.api.endpoint import ApiContext, Choice
from serve_app.api.generation import Generation, Usage
from serve_app.api.sse import named_event
from serve_app.api.wires.chat import call_name, entry
from serve_app.api.wires.items import ItemWire
from serve_app.api.wires.translation import TranslatedJob
from serve_app.errors import OverloadedError, RequestError
from serve_app.text.parts import Kind, Part
from serve_app.text.stream import TextPiece, TokenText

_PREFIXES = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}


class ResponsesJob(TranslatedJob):
    """One parsed request for a response."""

    def __init__(self, context: ApiContext, asked: ResponsesBody) -> None:
        """Raises as `ChatJob` does."""
        super().__init__(context, asked)
        self._response = _response(asked, self.card.name, self.body.reasoning_effort)
        self._with_logprobs = asked.with_logprobs

    def wire(self, generation: Generation) -> "ResponsesWire":
        """Return the wire for the answer."""
        logprobs = TextLogprobs() if self._with_logprobs else None
        return ResponsesWire(self._response, self.request_id, logprobs)


def _response(asked: ResponsesBody, model: str, effort: str | None) -> dict[str, Any]:
    """Return the fields of the response object that do not change."""
    given = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
    given |= {name: value for name in given if (value := getattr(asked, name)) is not None}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **given,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "tools": _repeated([tool.model_dump() for tool in asked.functions]),
        "text": {"format": _repeated(asked.format.model_dump(by_alias=True, exclude_none=True))},
        "reasoning": {"effort": effort, "summary": None},
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "top_logprobs": asked.top_logprobs or 0,
        "truncation": "disabled",
        "user": asked.user,
    }


def _repeated(value: Any) -> orjson.Fragment:
    """Return the client's value as JSON. It may contain integers of more than 64 bits."""
    return orjson.Fragment(json.dumps(value))


class TextLogprobs:
    """Assigns log-probabilities of tokens to the parts of the content."""

    def __init__(self) -> None:
        self._tokens = deque[tuple[int, Any]]()

    def entry(self, token: TokenText) -> tuple[int, orjson.Fragment]:
        """Return (offset of the token, its log-probability object)."""
        return token.offset, orjson.Fragment(orjson.dumps(entry(token)))

    def add(self, entries: Iterable[tuple[int, Any]]) -> None:
        """Add more of the answer's tokens."""
        self._tokens.extend(entries)

    def of(self, part: Part) -> list[Any]:
        """Return and remove the log-probabilities of this part's tokens."""
        entries = []
        while self._tokens and self._tokens[0][0] < part.end:
            entries.append(self._tokens.popleft()[1])
        return entries


class ResponsesWire(ItemWire):
    """The `response` object and its events."""

    def __init__(self, response: dict[str, Any], request_id: str, logprobs: TextLogprobs | None) -> None:
        """request_id: source of the items' and calls' ids. logprobs: None if not requested."""
        super().__init__()
        self._logprobs = logprobs
        self._item_logprobs: list[Any] = []
        self._response = response
        self._request_id = request_id
        self._output: list[dict[str, Any]] = []
        self._num_events = 0

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """Return the events for a piece."""
        if self._logprobs is not None:
            self._logprobs.add(map(self._logprobs.entry, piece.logprobs))
        return super().chunk(index, piece)

    def token(self, index: int, token: TokenText) -> Any:
        """Return the token's log-probabilities for `whole`."""
        return None if self._logprobs is None else self._logprobs.entry(token)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the non-streamed answer."""
        if self._logprobs is not None:
            self._logprobs.add(choices[0].logprobs)
        return super().whole(choices, usage)

    def begin(self) -> list[bytes]:
        """Return the events with the response before any output."""
        response = self._snapshot("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def open_item(self, part: Part) -> list[bytes]:
        """Return the events that add an item and, except for calls, its content part."""
        place = len(self._output)
        item: dict[str, Any] = {"id": f"{_PREFIXES[part.kind]}_{call_name(self._request_id, 0, place)}"}
        match part.kind:
            case Kind.CALL:
                call_id = f"call_{call_name(self._request_id, 0, part.call)}"
                item |= {"type": "function_call", "call_id": call_id, "name": part.text, "arguments": ""}
            case Kind.REASONING:
                item |= {"type": "reasoning", "summary": [], "content": []}
            case _:
                item |= {"type": "message", "role": "assistant", "content": []}
        self._output.append({**item, "status": "in_progress"})
        events = [self._event("response.output_item.added", output_index=place, item=self._output[-1])]
        if part.kind is not Kind.CALL:
            events.append(self._of_item("response.content_part.added", content_index=0, part=_content(part.kind, "")))
        return events

    def grow(self, part: Part) -> bytes:
        """Return the delta event for more text of the open item."""
        match part.kind:
            case Kind.ARGUMENTS:
                return self._of_item("response.function_call_arguments.delta", delta=part.text)
            case Kind.REASONING:
                return self._of_item("response.reasoning_text.delta", content_index=0, delta=part.text)
            case _:
                logprobs = [] if self._logprobs is None else self._logprobs.of(part)
                self._item_logprobs += logprobs
                delta = {"delta": part.text, "logprobs": logprobs}
                return self._of_item("response.output_text.delta", content_index=0, **delta)

    def close_item(self, kind: Kind, text: str, *, cut: bool) -> list[bytes]:
        """Return the events with the item's whole text, content and item."""
        item = self._output[-1]
        item["status"] = "incomplete" if cut else "completed"
        if kind is Kind.CALL:
            item["arguments"] = text
            events = [self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            logprobs, self._item_logprobs = self._item_logprobs, []
            content = _content(kind, text, logprobs)
            item["content"] = [content]
            done = {"text": text} if kind is Kind.REASONING else {"text": text, "logprobs": logprobs}
            events = [
                self._of_item(f"response.{content['type']}.done", content_index=0, **done),
                self._of_item("response.content_part.done", content_index=0, part=content),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

    def end(self, usage: Usage) -> bytes:
        """Return the event with the whole response."""
        response = self.answer(usage)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the `error` event and the failed response with its complete output items."""
        details = {"message": error.message, "code": error.code, "param": error.param, "request_id": request_id}
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        done = [item for item in self._output if item["status"] != "in_progress"]
        response = self._snapshot("failed", output=done, error={"code": code, "message": error.message})
        begin = [] if self.begun else self.begin()
        return b"".join([*begin, self._event("error", **details), self._event("response.failed", response=response)])

    def answer(self, usage: Usage) -> dict[str, Any]:
        """Return the whole response."""
        return self._snapshot(
            "incomplete" if self.is_cut else "completed",
            output=self._output,
            usage=_usage(usage),
            incomplete_details={"reason": "max_output_tokens"} if self.is_cut else None,
            completed_at=None if self.is_cut else int(time.time()),
        )

    def _snapshot(self, status: str, output: Sequence[Any] = (), **changes: Any) -> dict[str, Any]:
        unset = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None}
        return {**self._response, "status": status, **unset, **changes, "output": output}

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item."""
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, orjson.dumps(data))


def _content(kind: Kind, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
