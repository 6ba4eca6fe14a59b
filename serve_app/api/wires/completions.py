"""POST /v1/completions: OpenAI's legacy completions, with `echo` and `logprobs`."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import orjson

from serve_app.api.bodies.schemas import CompletionBody, parse_body
from serve_app.api.constraints import grammar_of
from serve_app.api.door.errors import error_json
from serve_app.api.endpoint import ApiContext, Choice
from serve_app.api.generation import Generation, Usage, chunk_usage
from serve_app.api.prepare import (
    answer_head,
    bad_words,
    check_model,
    check_prompt_logprobs,
    check_sequences,
    encode_prompt,
    engine_request,
    off_loop,
    stop_config,
    truncated,
)
from serve_app.api.sse import PING, ChunkTemplate, ChunkUsage
from serve_app.api.wires.details import LOWEST_LOGPROB, Details
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
        self._prompts: list[str | list[int]] = self.body.prompt
        self.num_prompts = len(self._prompts)
        check_sequences(self.num_prompts, self.body, context.limits)
        if self.body.suffix and not context.service.tokenizer.fills_in:
            raise InvalidRequestError(
                "`suffix` requires a fill-in-the-middle model; this model's tokenizer has no tokens for it",
                param="suffix",
            )
        self.stream = bool(self.body.stream)
        self.stop = stop_config(self.body)
        self._token_ids: list[list[int]] = []

    async def engine_requests(self, cache_salt: str) -> list[EngineRequest]:
        """Tokenize and validate. Returns one request per prompt."""
        body = self.body
        tokenizer = self._context.service.tokenizer
        for i, prompt in enumerate(self._prompts):
            whole = await self._encode(prompt, cache_salt)
            token_ids = truncated(whole, body, self._card)
            if len(token_ids) < len(whole):
                self._prompts[i] = token_ids
            self._token_ids.append(token_ids)
        num_tokens = sum(map(len, self._token_ids))
        tops = [("logprobs", body.logprobs if body.echo else None), ("prompt_logprobs", body.prompt_logprobs)]
        asked = [(name, top) for name, top in tops if top is not None]
        for name, top in asked:
            check_prompt_logprobs(name, num_tokens * body.num_choices, top, self._context.limits)
        most = self._context.limits.max_logprobs // self.num_prompts
        grammar, words = await grammar_of(body, tokenizer, self._context.observer), bad_words(body, tokenizer)
        make = partial(
            engine_request,
            body,
            card=self._card,
            prompt_field="prompt",
            max_logprobs=most,
            max_tokens=("max_tokens", 1 if body.scores_only else body.max_tokens),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=0 if body.logprobs is None and body.chooses_best else body.logprobs,
            prompt_logprobs=max((top for _, top in asked), default=None),
            bad_words=words,
            grammar=grammar,
            cache_salt=cache_salt,
        )
        return await off_loop(lambda: [make(token_ids=ids) for ids in self._token_ids], num_tokens)

    async def _encode(self, prompt: str | list[int], cache_salt: str) -> list[int]:
        tokenizer, suffix = self._context.service.tokenizer, self.body.suffix
        ids = prompt
        if isinstance(ids, str):
            special = self.body.add_special_tokens is not False
            ids = await encode_prompt(tokenizer, ids, self._card, add_special_tokens=special, scope=cache_salt)
        if not suffix:
            return ids
        behind = await encode_prompt(tokenizer, suffix, self._card, add_special_tokens=False, field="suffix")
        return tokenizer.fill_in(ids, behind)

    def wire(self, generation: Generation) -> "CompletionWire":
        """Return the wire for the answer."""
        head = answer_head("cmpl", "text_completion", self._card)
        tokenizer, top = self._context.service.tokenizer, self.body.logprobs
        details = Details(self.body, generation, tokenizer)
        usage = chunk_usage(self.body, generation)
        echo = None
        if self.body.echo:
            echo = _Echo(tokenizer, generation, self._prompts, self._token_ids, top or 0)
        num_returned = self.body.n or 1
        return CompletionWire(
            head, details, echo, num_choices=generation.n, num_returned=num_returned, top=top, usage=usage
        )


class _Echo:
    """The prompts as shown before their completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation,
        prompts: Sequence[str | list[int]],
        token_ids: Sequence[list[int]],
        top: int,
    ) -> None:
        """top: alternatives shown per token."""
        self._top = top
        self._tokenizer = tokenizer
        self._generation = generation
        self._texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        self._token_ids = token_ids

    def text(self, choice: int) -> str:
        """Return this choice's prompt."""
        return self._texts[choice // self._generation.n]

    def logprobs(self, choice: int) -> tuple[TokenText, ...]:
        """Return the prompt's tokens except the first, which has no log-probability."""
        prompt = choice // self._generation.n
        decoder = self._tokenizer.detokenizer(skip_special_tokens=False)
        pieces = [decoder.step(token_id) for token_id in self._token_ids[prompt]]
        whole, text = "".join(pieces) + decoder.flush(), self._texts[prompt]
        # The echo omits what the tokenizer adds before a text (its first token, a space).
        added = len(whole) - len(text) if whole.endswith(text) else 0
        offsets = [max(0, end - added) for end in accumulate(map(len, pieces))]
        entries = self._generation.prompt_logprobs[prompt]
        shown = (entry._replace(top=entry.top[: self._top]) for entry in entries)
        return tuple(token_text(self._tokenizer, entry, offsets[i]) for i, entry in enumerate(shown))

    def first(self, choice: int) -> bytes:
        """Return the first token of this choice's prompt."""
        return self._tokenizer.token_bytes(self._token_ids[choice // self._generation.n][0])


class CompletionWire:
    """OpenAI's `text_completion`, whole or as chunks."""

    def __init__(
        self,
        head: dict[str, Any],
        details: Details,
        echo: _Echo | None,
        *,
        num_choices: int,
        num_returned: int,
        top: int | None,
        usage: ChunkUsage,
    ) -> None:
        """num_choices: per prompt. num_returned: of these, the likeliest first."""
        self._head = head
        self._details = details
        self._num_choices = num_choices
        self._num_returned = num_returned
        self._echo = echo
        self._top = top
        self._template = ChunkTemplate(head, usage)

    def start(self, index: int) -> bytes:
        """Return the chunk with the echoed prompt and the prompt's fields, if requested."""
        prompt = self._details.of_prompt_json(index // self._num_choices)
        if self._echo is None and not prompt:
            return b""
        logprobs = None if self._top is None or self._echo is None else self._echoed(index)
        text = "" if self._echo is None else self._echo.text(index)
        return self._template.chunk(index, b'"text":' + orjson.dumps(text), logprobs, None, prompt)

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """Return the chunk for a piece: new text, the finish reason, or both."""
        if not (piece.text or piece.logprobs or piece.finish_reason or self._details.has_ids(piece)):
            return b""
        logprobs = None if self._top is None else self._logprobs([self.token(index, t) for t in piece.logprobs])
        text, details = b'"text":' + orjson.dumps(piece.text), self._details.of_piece(piece)
        return self._template.chunk(index, text, logprobs, piece.finish_reason, details)

    def ping(self) -> bytes:
        """Return the keep-alive: a comment."""
        return PING

    def end(self, usage: Usage) -> bytes:
        """Return the usage if requested, and `[DONE]`."""
        return self._template.end(usage.to_json())

    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the error event."""
        return self._template.error(error_json(error, request_id))

    def token(self, index: int, token: TokenText) -> "_Entry":
        """Return the token's entry in each list. Offsets include an echoed prompt."""
        return self._entry(token, 0 if self._echo is None else len(self._echo.text(index)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return a `text_completion`."""
        entries = [{"index": index, **self._choice(choice)} for index, choice in enumerate(self._best(choices))]
        return {**self._head, "choices": entries, "usage": usage.to_json()}

    def _best(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return each prompt's choices with the highest log-probability per token, best first."""
        if self._num_returned == self._num_choices:
            return [*choices]
        of_prompts = [choices[i : i + self._num_choices] for i in range(0, len(choices), self._num_choices)]
        return [
            choice for each in of_prompts for choice in sorted(each, key=_likelihood)[: -self._num_returned - 1 : -1]
        ]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._top is not None:
            logprobs = self._logprobs(choice.logprobs)
            if self._echo is not None:
                echoed = self._echoed(choice.index)
                logprobs = {key: echoed[key] + value for key, value in logprobs.items()}
        text = choice.text if self._echo is None else self._echo.text(choice.index) + choice.text
        return {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            **self._details.of_choice(choice),
            **self._details.of_prompt(choice.index // self._num_choices),
        }

    def _echoed(self, index: int) -> dict[str, Any]:
        assert self._echo is not None
        logprobs = self._logprobs([self._entry(token, 0) for token in self._echo.logprobs(index)])
        first = {"tokens": _token(self._echo.first(index)), "token_logprobs": None, "top_logprobs": None}
        return {key: [0 if key == "text_offset" else first[key], *values] for key, values in logprobs.items()}

    def _entry(self, token: TokenText, shift: int) -> "_Entry":
        top = None if self._top is None else orjson.Fragment(orjson.dumps(_top(token)))
        return token.offset + shift, _token(token.data), max(token.logprob, LOWEST_LOGPROB), top

    def _logprobs(self, entries: Sequence["_Entry"]) -> dict[str, Any]:
        return {
            "text_offset": [entry[0] for entry in entries],
            "tokens": [entry[1] for entry in entries],
            "token_logprobs": [entry[2] for entry in entries],
            "top_logprobs": [entry[3] for entry in entries],
        }


def _likelihood(choice: Choice) -> float:
    """Return the log-probability per token. A choice without tokens ranks last."""
    logprobs = [logprob for _, _, logprob, _ in choice.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else LOWEST_LOGPROB


_Entry = tuple[int, str, float, orjson.Fragment | None]
"""A token's offset, text, log-probability and alternatives."""


def _token(data: bytes) -> str:
    """Return the token's text, or escaped bytes if they are not UTF-8, so that tokens stay
    distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: TokenText) -> dict[str, float]:
    """Return the alternatives, and the token itself if it is not one of them."""
    top = {_token(data): max(p, LOWEST_LOGPROB) for data, p in token.top}
    top.setdefault(_token(token.data), max(token.logprob, LOWEST_LOGPROB))
    return top
