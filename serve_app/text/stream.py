"""Token deltas to text pieces of one choice. Decides what is shown, when a stop string ends it, and why it ended.

Lives at the ingress, so it outlives the replica that feeds it. Deltas are placed by their offset: tokens seen before
are ignored, missing ones are an error. (Failover hands on neither; see `fleet.resume_state`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from serve_app.core.results import FinishReason, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.text.detokenizer import REPLACEMENT, Detokenizer
from serve_app.text.reasoning_tokens import ReasoningTokens
from serve_app.text.stop import StopMatcher
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_format import Thinking


@dataclass(frozen=True, slots=True)
class StopConfig:
    """When text ends, besides what the engine decides. Stop strings are not looked for in the first `min_tokens`.

    markers: special tokens that occur in it are shown, for whoever reads the text; all others are not.
    thinking: the reasoning whose tokens are counted.
    nothing: the text is empty; the token that an engine generates at least is none of it.
    """

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    markers: str = ""
    thinking: Thinking | None = None
    nothing: bool = False


@dataclass(frozen=True, slots=True)
class TokenText:
    """One shown token with its log-probability; `offset` counts the characters of the choice's text before it."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one delta adds to the text. `token_ids` are all new ones, also those that have no text (yet).

    `finish_reason` is set on the last piece, and `stop_string` if it was one that ended the text.
    """

    text: str
    logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()


def token_text(tokenizer: Tokenizer, entry: TokenLogprob, offset: int) -> TokenText:
    """`entry` with bytes in place of ids."""
    data = tokenizer.token_bytes
    return TokenText(data(entry.token_id), entry.logprob, tuple((data(i), p) for i, p in entry.top), offset)


class TextStream:
    """The text of one choice. `feed` deltas until `finish_reason` is set."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: StopConfig) -> None:
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._matcher = StopMatcher(stop.strings, include=stop.include)
        self._stop = stop
        self._reasoning = None if stop.thinking is None else ReasoningTokens(stop.thinking)
        self._decoded = 0
        self._shown = 0
        self._pending: list[TokenText] = []
        self.num_tokens = 0
        """Output tokens so far, the one that ended the text included."""
        self.finish_reason: FinishReason | None = None

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        """Made when the first token comes."""
        return self._tokenizer.detokenizer(self._prompt_token_ids, markers=self._stop.markers)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of the output tokens; None where there can be no reasoning."""
        return None if self._reasoning is None else self._reasoning.count

    def feed(self, delta: TokenDelta) -> TextPiece:
        """The new text; may be empty.

        Raises `EngineError` when tokens are missing before this delta, and the error that it reports. Tokens seen
        before are ignored, and so is everything after the end.
        """
        if self.finish_reason is not None:
            return TextPiece("")
        if delta.offset > self.num_tokens:
            raise EngineError(f"tokens {self.num_tokens} to {delta.offset} of the answer were lost")
        if delta.finish_reason is FinishReason.ERROR:
            raise delta.error or EngineError("the engine failed this request")
        if self._stop.nothing:
            self.finish_reason = FinishReason.LENGTH if delta.token_ids else None
            return TextPiece("", finish_reason=self.finish_reason)
        known = self.num_tokens - delta.offset
        text = self._read(delta, known)
        if self.finish_reason is None and delta.finish_reason is not None:
            text += self._show(self._last_text(cut=delta.finish_reason is FinishReason.LENGTH))
            if not self._matcher.stopped:
                text += self._matcher.flush()
            self.finish_reason = FinishReason.STOP if self._matcher.stopped else delta.finish_reason
        self._shown += len(text)
        token_ids = delta.token_ids[known : self.num_tokens - delta.offset]
        return TextPiece(text, self._release(), self.finish_reason, self._matcher.found, token_ids)

    def _last_text(self, *, cut: bool) -> str:
        """What was held back as part of a character. An answer that was cut ends before one, not inside."""
        text = self._detokenizer.flush()
        return text.rstrip(REPLACEMENT) if cut else text

    def _read(self, delta: TokenDelta, known: int) -> str:
        """Decode the delta's tokens after the first `known` ones."""
        last = len(delta.token_ids) - 1
        logprobs = delta.logprobs
        text = ""
        for i in range(known, len(delta.token_ids)):
            self.num_tokens += 1
            if i == last and delta.finish_reason is FinishReason.STOP and not self._stop.include:
                break  # the end-of-sequence or stop token says "end"; it is not text
            if logprobs:
                self._pending.append(token_text(self._tokenizer, logprobs[i], self._decoded))
            piece = self._detokenizer.step(delta.token_ids[i])
            if self._reasoning is not None:
                self._reasoning.read(piece)
            text += self._show(piece)
            if self._matcher.stopped:
                self.finish_reason = FinishReason.STOP
                break
        return text

    def _show(self, text: str) -> str:
        self._decoded += len(text)
        return text if self.num_tokens <= self._stop.min_tokens else self._matcher.feed(text)

    def _release(self) -> tuple[TokenText, ...]:
        """Log-probabilities of the tokens whose text has begun to show (all, at an end without a stop string)."""
        if not self._pending:
            return ()
        if self.finish_reason is not None and not self._matcher.stopped:
            count = len(self._pending)
        else:
            count = sum(entry.offset < self._shown for entry in self._pending)
        released, self._pending = tuple(self._pending[:count]), self._pending[count:]
        return released
