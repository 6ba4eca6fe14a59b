"""Matchers: they follow outputs through a grammar and return the allowed next tokens."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from serve_app.core.sampling_params import ThinkingBudget
from serve_app.errors import EngineError, InvalidRequestError, RequestError
from serve_app.grammars import library
from serve_app.grammars.recent import Recent
from serve_app.grammars.refusals import Refusal
from serve_app.grammars.thinking_budget import Reasoning
from serve_app.grammars.token_set import TokenSet, Vocabulary

if TYPE_CHECKING:
    import llguidance

_MAX_KEPT = 256
_MAX_KEPT_CHARS = 2**22
"""Limits on cached matchers: their number (about 0.1 MiB each) and the total length of their
grammars."""
_WRONG_OUTPUT = ("doesn't satisfy the grammar", "out of range", "not eaten by parser")
"""llguidance's messages for a token that it did not allow."""


def check_has_end(end_ids: Sequence[int], param: str | None = None) -> None:
    """Raise `InvalidRequestError` if no token ends a text: a constrained output could not end."""
    if not end_ids:
        raise InvalidRequestError(
            "constrained output (schemas, grammars, choices, tools) is not available for this model: neither its "
            "configuration nor its tokenizer defines an end token",
            param=param,
            code=Refusal.UNSUPPORTED,
        )


class Matcher:
    """Follows one output through a grammar. Not thread-safe."""

    def __init__(self, matcher: "llguidance.LLMatcher", width: int, eos_token_ids: frozenset[int]) -> None:
        """width: number of logits."""
        self._matcher = matcher
        self._width = width
        self.eos_token_ids = eos_token_ids

    @property
    def error(self) -> str | None:
        """Why it cannot continue: too much work, or no text can match."""
        return library.error_of(self._matcher)

    def failure(self) -> RequestError:
        """Return the error for an output that cannot continue.

        It blames the client's grammar, unless the output itself is wrong.
        """
        reason = self.error
        if reason is not None and any(sign in reason for sign in _WRONG_OUTPUT):
            return EngineError(f"the grammar does not allow the output: {reason}")
        if reason is None or "NoExtension" in reason:
            return InvalidRequestError("the grammar allows no next token", code=Refusal.UNMATCHABLE)
        return InvalidRequestError(f"the grammar takes too much work: {reason}", code=Refusal.TOO_LARGE)

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Advance by output tokens.

        Returns False, and sets `error`, if the grammar does not allow them.
        """
        return self._matcher.consume_tokens(list(token_ids))

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def allowed(self) -> TokenSet | None:
        """Return the allowed next ids; None after an `error`."""
        packed = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else TokenSet.cut(packed, self._width)

    def forced(self) -> list[int]:
        """Return the next tokens if the grammar allows only one text."""
        return self._matcher.compute_ff_tokens()


class BudgetedMatcher(Matcher):
    """Follows an output that starts with a reasoning of limited length."""

    def __init__(
        self, matcher: Matcher, reasoning: Reasoning, tokens: Sequence[bytes], close_ids: Sequence[int]
    ) -> None:
        """tokens: the vocabulary's. close_ids: the tokens of the closing mark."""
        super().__init__(matcher._matcher, matcher._width, matcher.eos_token_ids)
        self._reasoning = reasoning
        self._tokens = tokens
        self._close_ids = close_ids
        self._stages = [reasoning.start()]

    def consume(self, token_ids: Sequence[int]) -> bool:
        """As `Matcher.consume`."""
        if not super().consume(token_ids):
            return False
        for token_id in token_ids:
            closing = list(self._rest()[:1]) == [token_id]
            self._stages.append(self._reasoning.advance(self._stages[-1], self._tokens[token_id], closing=closing))
        return True

    def roll_back(self, num_tokens: int) -> None:
        """As `Matcher.roll_back`."""
        super().roll_back(num_tokens)
        del self._stages[len(self._stages) - num_tokens :]

    def allowed(self) -> TokenSet | None:
        """As `Matcher.allowed`. Returns only the closing mark if the reasoning must end."""
        allowed = super().allowed()
        if allowed is not None and (rest := self._rest()):
            return allowed.only(rest[0])
        return allowed

    def forced(self) -> list[int]:
        """As `Matcher.forced`."""
        return list(self._rest()) or super().forced()

    def _rest(self) -> Sequence[int]:
        return self._reasoning.rest(self._stages[-1], self._close_ids)


class Grammars:
    """Makes matchers for one vocabulary. Thread-safe. Caches a limited number of recent ones."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], eos_token_ids: Sequence[int], width: int) -> None:
        """width: number of logits. Ids beyond the vocabulary never match.

        `eos_token_ids` are allowed where a text may end. `vocabulary` is called for the first
        matcher, which takes 0.3 s for 49,000 tokens.
        """
        self._vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._width = width
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._known: Vocabulary
        self._building = Lock()
        self._kept: Recent[llguidance.LLMatcher] = Recent(_MAX_KEPT, _MAX_KEPT_CHARS)

    def matcher(self, text: str, budget: ThinkingBudget | None = None, *, param: str | None = None) -> Matcher:
        """Return a new matcher, before the first output token. `budget` limits reasoning tokens.

        Raises `InvalidRequestError` if no output can match or end.
        """
        check_has_end(self._eos_token_ids, param)
        kept = self._kept.get(text)
        if kept is None:
            kept = self._open(text, param)
            self._kept.put(text, kept)
        matcher = Matcher(kept.deep_copy(), self._width, frozenset(self._eos_token_ids))
        if budget is None:
            return matcher
        return BudgetedMatcher(matcher, Reasoning(budget), self._known.tokens, self._known.encode(budget.close))

    def build(self) -> "llguidance.LLTokenizer":
        """Read the vocabulary, unless already done."""
        with self._building:
            if self._tokenizer is None:
                self._known = self._vocabulary().cut(self._width)
                self._tokenizer = library.tokenizer(self._known, self._eos_token_ids)
            return self._tokenizer

    def _open(self, text: str, param: str | None) -> "llguidance.LLMatcher":
        matcher = library.matcher(self.build(), text)
        # Some grammars fail only at their first mask.
        if not matcher.is_error() and Matcher(matcher, self._width, frozenset()).allowed():
            return matcher
        reason = library.error_of(matcher) or "no text can match it"
        raise InvalidRequestError(f"this grammar cannot be enforced: {reason}", param=param, code=Refusal.UNMATCHABLE)
