"""Turns token deltas into the parts of one choice.

Decides the emitted text, stop strings and the finish reason. Stop strings, their `min_tokens` and
log-probabilities apply only to content, not to marks, reasoning or calls.
It runs in the ingress, so it survives the replica. Deltas are placed by their offset: known tokens
are ignored, missing ones are an error. (Failover produces neither; see `fleet.resume_state`.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from serve_app.core.results import FinishReason, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.text.detokenizer import REPLACEMENT, Detokenizer
from serve_app.text.message_parser import MessageParser
from serve_app.text.parts import Kind, Part, PlainText, joined
from serve_app.text.reasoning_tokens import ReasoningTokens
from serve_app.text.stop import StopMatcher
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_format import Thinking, ToolFormat


@dataclass(frozen=True, slots=True)
class StopConfig:
    """Conditions that end the text, besides the engine's, and the parts that it may have.

    min_tokens: stop strings are not searched in the first `min_tokens` tokens, not counting
    reasoning.
    markers: special tokens in this text are kept for the parser; all others are removed.
    thinking, tools, parameters: as for `MessageParser`. Without reasoning and tools, all text is
    content.
    nothing: the text is empty; the one token that the engine generates is ignored.
    """

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    markers: str = ""
    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nothing: bool = False

    def parser(self, stops: StopMatcher) -> MessageParser | PlainText:
        """Return the parser of one answer. `stops` ends its content."""
        if self.tools is None and self.thinking is None:
            return PlainText(stops)
        return MessageParser(self.tools, self.parameters, self.thinking, stops)


@dataclass(frozen=True, slots=True)
class TokenText:
    """A content token with its log-probability. `offset`: characters of the answer before it."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The new parts from one delta.

    `token_ids` are all new ids, including those without text (yet).
    The last piece has `finish_reason`, `stop_string` if one ended the content, and `called` if the
    answer contains calls and the last call is complete.
    """

    parts: Sequence[Part] = ()
    logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()
    called: bool = False

    @property
    def text(self) -> str:
        """The new content."""
        return content_of(self.parts)


def content_of(parts: Sequence[Part]) -> str:
    """Return the content of `parts` as one text."""
    return "".join(part.text for part in parts if part.kind is Kind.CONTENT)


def token_text(tokenizer: Tokenizer, entry: TokenLogprob, offset: int) -> TokenText:
    """Convert `entry`: token bytes instead of ids."""
    data = tokenizer.token_bytes
    return TokenText(data(entry.token_id), entry.logprob, tuple((data(i), p) for i, p in entry.top), offset)


class TextStream:
    """The parts of one choice. Call `feed` with deltas until `finish_reason` is set."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: StopConfig) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._stops = StopMatcher(stop.strings, include=stop.include)
        self._parser = stop.parser(self._stops)
        self._stop = stop
        self._reasoning = None if stop.thinking is None else ReasoningTokens(stop.thinking)
        self._decoded = 0
        """Number of characters of the answer so far."""
        self._emitted_end = 0
        """End of the emitted content, in characters of the answer."""
        self._pending: list[TokenText] = []
        self.num_tokens = 0
        """Output tokens so far, including the one that ended the text."""
        self.finish_reason: FinishReason | None = None

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        """Created when the first token comes."""
        return self._tokenizer.detokenizer(self._prompt_token_ids, markers=self._stop.markers)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None if there can be no reasoning."""
        return None if self._reasoning is None else self._reasoning.count

    def feed(self, delta: TokenDelta) -> TextPiece:
        """Return the new parts; may be empty.

        Raises `EngineError` if tokens before this delta are missing, and the error that the delta
        reports. Tokens seen before and everything after the end are ignored.
        """
        if self.finish_reason is not None:
            return TextPiece()
        if delta.offset > self.num_tokens:
            raise EngineError(f"tokens {self.num_tokens} to {delta.offset} of the answer were lost")
        if delta.finish_reason is FinishReason.ERROR:
            raise delta.error or EngineError("the engine failed this request")
        if self._stop.nothing:
            self.finish_reason = FinishReason.LENGTH if delta.token_ids else None
            return TextPiece(finish_reason=self.finish_reason)
        known = self.num_tokens - delta.offset
        parts = self._read(delta, known)
        if not self._stops.stopped and delta.finish_reason is not None:
            parts += self._show(self._last_text(cut=delta.finish_reason is FinishReason.LENGTH))
            if not self._stops.stopped:
                parts += self._parser.finish()
            self.finish_reason = delta.finish_reason
        if self._stops.stopped:
            self.finish_reason = FinishReason.STOP
        parts = joined(parts)
        token_ids = delta.token_ids[known : self.num_tokens - delta.offset]
        called = self.finish_reason is not None and bool(self._parser.num_calls) and not self._parser.in_call
        return TextPiece(parts, self._release(parts), self.finish_reason, self._stops.found, token_ids, called)

    def _last_text(self, *, cut: bool) -> str:
        """Return the text held back as an incomplete character.

        A cut answer drops that character.
        """
        text = self._detokenizer.flush()
        text = text.rstrip(REPLACEMENT) if cut else text
        self._decoded += len(text)
        return text

    def _read(self, delta: TokenDelta, known: int) -> list[Part]:
        """Decode the delta's tokens after the first `known` ones."""
        last = len(delta.token_ids) - 1
        logprobs = delta.logprobs
        parts: list[Part] = []
        texts: list[str] = []
        for i in range(known, len(delta.token_ids)):
            self.num_tokens += 1
            if i == last and delta.finish_reason is FinishReason.STOP and not self._stop.include:
                break  # the end-of-sequence or stop token has no text
            if logprobs:
                self._pending.append(token_text(self._tokenizer, logprobs[i], self._decoded))
            texts.append(self._detokenizer.step(delta.token_ids[i]))
            self._decoded += len(texts[-1])
            if self._reasoning is not None:
                self._reasoning.read(texts[-1])
            if self._stop.strings or logprobs:  # by token, to stop exactly at the last one
                parts += self._show(texts.pop())
                if self._stops.stopped:
                    return parts
        return parts + self._show("".join(texts))

    def _show(self, text: str) -> list[Part]:
        least = self._stop.min_tokens
        return self._parser.feed(text, looks=not least or self.num_tokens - (self.num_reasoning_tokens or 0) > least)

    def _release(self, parts: Sequence[Part]) -> tuple[TokenText, ...]:
        """Return the log-probabilities of the tokens in these content parts.

        The first token's text may start before the part. If the answer ended without a stop string,
        trailing tokens without text are included.
        """
        if not self._pending:
            return ()
        released: list[TokenText] = []
        following = [*(token.offset for token in self._pending[1:]), self._decoded]
        spans = list(zip(self._pending, following, strict=True))
        for part in parts:
            if part.kind is Kind.CONTENT:
                self._emitted_end = part.end
                released += [t for t, end in spans if t.offset < part.end and (part.at <= t.offset or part.at < end)]
                spans = [(t, end) for t, end in spans if t.offset >= part.end]
        self._pending = [token for token, _ in spans]
        if self.finish_reason is not None and not self._stops.stopped and self._emitted_end == self._decoded:
            released += self._pending
        return tuple(released)
