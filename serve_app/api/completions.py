"""POST /v1/completions: text or token ids in, OpenAI's (legacy) completion formats out, with `echo` and `logprobs`."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from serve_app.api.chat import LOWEST_LOGPROB
from serve_app.api.constraints import grammar_of
from serve_app.api.endpoint import ApiContext, Choice
from serve_app.api.errors import error_json
from serve_app.api.generation import Generation, Usage, chunk_usage
from serve_app.api.limits import ApiLimits
from serve_app.api.prepare import answer_head, check_model, check_sequences, encode_prompt, engine_request, stop_config
from serve_app.api.schemas import CompletionBody, parse_body
from serve_app.api.sse import ChunkTemplate, ChunkUsage
from serve_app.core.request import EngineRequest
from serve_app.errors import InvalidRequestError, RequestError
from serve_app.text.stream import TextPiece, TokenText, token_text
from serve_app.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionJob:
    """One parsed completion request."""

    def __init__(self, context: ApiContext, raw: bytes) -> None:
        """Raises `InvalidRequestError`, `ModelNotFoundError`, `UnavailableError`."""
        self.body = parse_body(CompletionBody, raw)
        self._context = context
        self._card = context.service.model
        check_model(self.body.model, self._card)
        self._prompts: list[str] | list[list[int]] = self.body.prompt
        self.num_prompts = len(self._prompts)
        check_sequences(self.num_prompts, self.body, context.limits)
        self.stream = bool(self.body.stream)
        self.stop = stop_config(self.body)
        self._token_ids: list[list[int]] = []

    async def engine_requests(self) -> list[EngineRequest]:
        """Tokenize, validate; one request per prompt."""
        body = self.body
        tokenizer = self._context.service.tokenizer
        self._token_ids = [
            await encode_prompt(tokenizer, prompt, self._card) if isinstance(prompt, str) else prompt
            for prompt in self._prompts
        ]
        echoed = body.logprobs if body.echo else None
        if echoed is not None:
            num_tokens = sum(map(len, self._token_ids)) * (body.n or 1)
            _check_prompt_logprobs(num_tokens, echoed, self._context.limits)
        most = self._context.limits.max_logprobs // self.num_prompts
        grammar = await grammar_of(body, tokenizer)
        return [
            engine_request(
                body,
                token_ids,
                self._card,
                prompt_field="prompt",
                max_logprobs=most,
                max_tokens=("max_tokens", body.max_tokens),
                default_max_tokens=DEFAULT_MAX_TOKENS,
                logprobs=body.logprobs,
                prompt_logprobs=echoed,
                grammar=grammar,
            )
            for token_ids in self._token_ids
        ]

    def wire(self, generation: Generation) -> "CompletionWire":
        """The answer's formats."""
        head = answer_head("cmpl", "text_completion", self._card)
        echo = _Echo(self._context.service.tokenizer, generation, self._prompts, self._token_ids)
        usage = chunk_usage(self.body, generation)
        return CompletionWire(head, echo if self.body.echo else None, top=self.body.logprobs, usage=usage)


def _check_prompt_logprobs(num_tokens: int, top: int, limits: ApiLimits) -> None:
    if num_tokens * (top + 1) > limits.max_prompt_logprobs:
        raise InvalidRequestError(
            f"`echo` with `logprobs` {top} over {num_tokens} echoed tokens: at most {limits.max_prompt_logprobs} "
            "log-probabilities per request",
            param="logprobs",
        )


class _Echo:
    """The prompts as they appear in front of their completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation,
        prompts: Sequence[str | list[int]],
        token_ids: Sequence[list[int]],
    ) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        self._token_ids = token_ids

    def text(self, choice: int) -> str:
        """The prompt of this choice."""
        return self._texts[choice // self._generation.n]

    def logprobs(self, choice: int) -> tuple[TokenText, ...]:
        """The prompt's tokens after the first; the first has no log-probability (see `first`)."""
        prompt = choice // self._generation.n
        decoder = self._tokenizer.detokenizer(skip_special_tokens=False)
        pieces = [decoder.step(token_id) for token_id in self._token_ids[prompt]]
        whole, text = "".join(pieces) + decoder.flush(), self._texts[prompt]
        # What the tokenizer puts in front of a text (its first token, a space) is not in the echo.
        added = len(whole) - len(text) if whole.endswith(text) else 0
        offsets = [max(0, end - added) for end in accumulate(map(len, pieces))]
        entries = self._generation.prompt_logprobs[prompt]
        return tuple(token_text(self._tokenizer, entry, offsets[i]) for i, entry in enumerate(entries))

    def first(self, choice: int) -> bytes:
        """The first token of this choice's prompt."""
        return self._tokenizer.token_bytes(self._token_ids[choice // self._generation.n][0])


class CompletionWire:
    """OpenAI's `text_completion`, whole or as chunks."""

    def __init__(self, head: dict[str, Any], echo: _Echo | None, *, top: int | None, usage: ChunkUsage) -> None:
        self._head = head
        self._echo = echo
        self._top = top
        self._template = ChunkTemplate(head, usage)

    def start(self, index: int) -> bytes:
        """The prompt, where it was asked for."""
        if self._echo is None:
            return b""
        logprobs = None if self._top is None else self._echoed(index)
        return self._template.chunk(index, b'"text":' + orjson.dumps(self._echo.text(index)), logprobs, None)

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """New text, the finish reason, or both."""
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return b""
        logprobs = None if self._top is None else self._logprobs([self.token(index, t) for t in piece.logprobs])
        return self._template.chunk(index, b'"text":' + orjson.dumps(piece.text), logprobs, piece.finish_reason)

    def end(self, usage: Usage) -> bytes:
        """The usage, where it was asked for, and the mark of the end."""
        return self._template.end(usage.to_json())

    def error(self, error: RequestError, request_id: str) -> bytes:
        """What a response's body would say of it."""
        return self._template.error(error_json(error, request_id))

    def token(self, index: int, token: TokenText) -> "_Entry":
        """The token's part of each list; offsets count an echoed prompt."""
        return self._entry(token, 0 if self._echo is None else len(self._echo.text(index)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """A `text_completion`."""
        return {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": usage.to_json()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._top is not None:
            logprobs = self._logprobs(choice.logprobs)
            if self._echo is not None:
                echoed = self._echoed(choice.index)
                logprobs = {key: value and echoed[key] + value for key, value in logprobs.items()}
        text = choice.text if self._echo is None else self._echo.text(choice.index) + choice.text
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _echoed(self, index: int) -> dict[str, Any]:
        assert self._echo is not None
        logprobs = self._logprobs([self._entry(token, 0) for token in self._echo.logprobs(index)])
        first = {"tokens": _token(self._echo.first(index)), "token_logprobs": None, "top_logprobs": None}
        return {
            key: values and [0 if key == "text_offset" else first[key], *values] for key, values in logprobs.items()
        }

    def _entry(self, token: TokenText, shift: int) -> "_Entry":
        top = orjson.Fragment(orjson.dumps(_top(token))) if self._top else None
        return token.offset + shift, _token(token.data), max(token.logprob, LOWEST_LOGPROB), top

    def _logprobs(self, entries: Sequence["_Entry"]) -> dict[str, Any]:
        return {
            "text_offset": [entry[0] for entry in entries],
            "tokens": [entry[1] for entry in entries],
            "token_logprobs": [entry[2] for entry in entries],
            "top_logprobs": [entry[3] for entry in entries] if self._top else None,
        }


_Entry = tuple[int, str, float, orjson.Fragment | None]
"""A token's offset, text, log-probability, and alternatives."""


def _token(data: bytes) -> str:
    """The token's text; bytes that are no text alone are spelled out, so that two such tokens stay two."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: TokenText) -> dict[str, float]:
    """The alternatives and, if it is not one of them, the token itself."""
    top = {_token(data): max(p, LOWEST_LOGPROB) for data, p in token.top}
    top.setdefault(_token(token.data), max(token.logprob, LOWEST_LOGPROB))
    return top
