"""Grammars: what an output may be, as text; and the matcher that follows an output through one.

A grammar travels as text in `SamplingParams.grammar` and nothing else does: a matcher's state is a function of that
text and the output tokens, so whoever has both can make it again (a fork, a preempted request, another replica).

The work is llguidance's (Earley parser over a lexer of regex derivatives, masks on demand), chosen because its work is
bounded whatever the grammar, and because it refuses what it cannot enforce instead of ignoring it.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from serve_app.core.sampling_params import MAX_GRAMMAR_CHARS
from serve_app.errors import InvalidRequestError
from serve_app.thinking_budget import ThinkingBudget
from serve_app.token_set import TokenSet, Vocabulary

if TYPE_CHECKING:
    import llguidance

MAX_DEPTH = 64
"""Nesting of a JSON schema."""
MAX_CHOICES = 10_000
_MAX_KEPT = 256
_MAX_KEPT_CHARS = 2**22
"""Matchers that are kept, by number (about 0.1 MiB each) and by the text of their grammars."""
_MAX_LOCATE_S = 0.2
"""Processor time for finding the part of a refused schema that is at fault."""
# ", " and ": " are what models write on one line. Free whitespace would be an invitation to loop in it.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Schema keywords that hold one schema, a list of them, or schemas by name.
_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


class Refusal(StrEnum):
    """Why a constraint is refused, as an error's code."""

    TOO_LARGE = "grammar_too_large"
    INVALID = "grammar_invalid"
    """A regular expression or a grammar that is none."""
    UNSUPPORTED = "grammar_unsupported"
    """A JSON schema that cannot be enforced."""
    UNMATCHABLE = "grammar_unmatchable"
    """No text can match it, or finding one is too much work."""


def json_schema(schema: Mapping[str, Any] | str, *, param: str = "response_format") -> str:
    """The grammar of the JSON texts that `schema` (an object, or its text) accepts.

    Raises `InvalidRequestError` for what cannot be enforced, naming keyword and path.
    """
    if isinstance(schema, str):
        schema = _parse(schema, param)
    _check_depth(schema, param)
    text = _compile(schema)
    if (reason := _reason(text)) is not None:
        path, reason = _locate(schema, reason)
        where = f" at {path}" if path else ""
        raise InvalidRequestError(
            f"`{param}`: this JSON schema cannot be enforced{where}: {reason}",
            param=param,
            code=_code(text, Refusal.UNSUPPORTED),
        )
    return text


def json_object(*, param: str = "response_format") -> str:
    """The grammar of JSON objects."""
    return json_schema({"type": "object"}, param=param)


def regex(pattern: str, *, param: str = "structured_outputs") -> str:
    """The grammar of the texts that `pattern` matches as a whole (syntax of Rust's regex crate)."""
    return _checked(_library().LLMatcher.grammar_from_regex(pattern), param)


def lark(grammar: str, *, param: str = "structured_outputs") -> str:
    """A grammar in llguidance's dialect of Lark."""
    return _checked(_library().LLMatcher.grammar_from_lark(grammar), param)


def choice(answers: Sequence[str], *, param: str = "structured_outputs") -> str:
    """The grammar of exactly these texts."""
    if not answers or len(answers) > MAX_CHOICES or not all(answers):
        raise InvalidRequestError(
            f"`{param}` must hold 1 to {MAX_CHOICES} texts that are not empty",
            param=param,
            code=Refusal.TOO_LARGE if answers else Refusal.UNMATCHABLE,
        )
    alternatives = " | ".join(json.dumps(answer, ensure_ascii=False) for answer in dict.fromkeys(answers))
    return lark(f"start: {alternatives}", param=param)


def compose(rules: str, parts: Mapping[str, str], *, param: str) -> str:
    """One grammar from `rules` (Lark) that refer to other grammars of this module as `@name`."""
    grammars: list[dict[str, Any]] = [{"name": "main", "lark_grammar": rules}]
    for name, text in parts.items():
        part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append({**part, "name": name})
    return _checked(json.dumps({"grammars": grammars}, ensure_ascii=False), param)


def check_has_end(end_ids: Sequence[int], param: str | None = None) -> None:
    """Raise `InvalidRequestError` where no token ends a text: a constrained output could not end."""
    if not end_ids:
        raise InvalidRequestError(
            "this model has no token that ends a text, in its configuration or its tokenizer: constrained output "
            "(schemas, grammars, choices, tools) is not available",
            param=param,
            code=Refusal.UNSUPPORTED,
        )


class Matcher:
    """Follows one output through a grammar. Not thread-safe."""

    def __init__(self, matcher: "llguidance.LLMatcher", width: int, eos_token_ids: frozenset[int]) -> None:
        """width: of the logits."""
        self._matcher = matcher
        self._width = width
        self.eos_token_ids = eos_token_ids

    @property
    def error(self) -> str | None:
        """Why it cannot go on: too much work, or no text could ever match."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Go on by tokens of the output; False, and an `error`, when the grammar does not allow them."""
        return self._matcher.consume_tokens(list(token_ids))

    def roll_back(self, num_tokens: int) -> None:
        """Forget the newest tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def allowed(self) -> TokenSet | None:
        """Which ids may come next; None when nothing can be said (see `error`)."""
        packed = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else TokenSet.cut(packed, self._width)

    def forced(self) -> list[int]:
        """Tokens that must come next, because the grammar leaves no choice about their text."""
        return self._matcher.compute_ff_tokens()


class BudgetedMatcher(Matcher):
    """Follows an output that begins with a reasoning of bounded length."""

    def __init__(
        self, matcher: Matcher, budget: ThinkingBudget, tokens: Sequence[bytes], close_ids: Sequence[int]
    ) -> None:
        """tokens: the vocabulary's; close_ids: the closing mark's."""
        super().__init__(matcher._matcher, matcher._width, matcher.eos_token_ids)
        self._budget = budget
        self._tokens = tokens
        self._close_ids = close_ids
        self._stages = [budget.start()]

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Likewise."""
        if not super().consume(token_ids):
            return False
        for token_id in token_ids:
            closing = list(self._rest()[:1]) == [token_id]
            self._stages.append(self._budget.advance(self._stages[-1], self._tokens[token_id], closing=closing))
        return True

    def roll_back(self, num_tokens: int) -> None:
        """Likewise."""
        super().roll_back(num_tokens)
        del self._stages[len(self._stages) - num_tokens :]

    def allowed(self) -> TokenSet | None:
        """Likewise; where the reasoning must be closed, nothing else."""
        allowed = super().allowed()
        if allowed is not None and (rest := self._rest()):
            return allowed.only(rest[0])
        return allowed

    def forced(self) -> list[int]:
        """Likewise."""
        return list(self._rest()) or super().forced()

    def _rest(self) -> Sequence[int]:
        return self._budget.rest(self._stages[-1], self._close_ids)


class Grammars:
    """Makes matchers for one vocabulary. Thread-safe; keeps a bounded number of those asked for last."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], eos_token_ids: Sequence[int], width: int) -> None:
        """width: of the logits; ids beyond the vocabulary never match. `eos_token_ids` may come where a text may end.

        `vocabulary` is called when the first matcher is made, which takes a third of a second for 49,000 tokens.
        """
        self._vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._width = width
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._known: Vocabulary
        self._building = Lock()
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._kept_chars = 0
        self._lock = Lock()

    def matcher(self, text: str, *, param: str | None = None) -> Matcher:
        """A matcher at the start of an output. Raises `InvalidRequestError` where no output could ever match or end."""
        check_has_end(self._eos_token_ids, param)
        budget, text = ThinkingBudget.split(text)
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
        if kept is None:
            kept = self._open(text, param)
            self._keep(text, kept)
        matcher = Matcher(kept.deep_copy(), self._width, frozenset(self._eos_token_ids))
        if budget is None:
            return matcher
        return BudgetedMatcher(matcher, budget, self._known.tokens, self._known.encode(budget.close))

    def build(self) -> "llguidance.LLTokenizer":
        """Read the vocabulary, if that is still to be done."""
        with self._building:
            if self._tokenizer is None:
                self._known = self._vocabulary().cut(self._width)
                wrapper = _library().TokenizerWrapper(_View(self._known, self._eos_token_ids[0]))
                self._tokenizer = _library().LLTokenizer(wrapper, eos_token=list(self._eos_token_ids))
            return self._tokenizer

    def _open(self, text: str, param: str | None) -> "llguidance.LLMatcher":
        matcher: llguidance.LLMatcher = _library().LLMatcher(self.build(), text, log_level=0, limits=_limits())
        if not matcher.is_error():
            allowed = Matcher(
                matcher, self._width, frozenset()
            ).allowed()  # some grammars fail at their first mask only
            if allowed:
                return matcher
        reason = _first_line(matcher.get_error()) or "no text can match it"
        raise InvalidRequestError(f"this grammar cannot be enforced: {reason}", param=param, code=Refusal.UNMATCHABLE)

    def _keep(self, text: str, matcher: "llguidance.LLMatcher") -> None:
        with self._lock:
            if text in self._kept:
                return
            self._kept[text] = matcher
            self._kept_chars += len(text)
            while len(self._kept) > _MAX_KEPT or self._kept_chars > _MAX_KEPT_CHARS:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_chars -= len(oldest)


class _View:
    """A vocabulary by the names that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def _library() -> Any:
    # Loaded with the first grammar: a model is measured and run without it too.
    import llguidance

    return llguidance


@cache
def _limits() -> "llguidance.LLParserLimits":
    limits: llguidance.LLParserLimits = _library().LLParserLimits(verbose_errors=False)
    return limits


def _parse(text: str, param: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"`{param}` must be a JSON object, or the text of one", param=param, code=Refusal.INVALID
        )
    return schema


def _compile(schema: Mapping[str, Any]) -> str:
    text: str = _library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    return text


def _reason(text: str) -> str | None:
    """Why the grammar is refused; None when it is not."""
    if len(text) > MAX_GRAMMAR_CHARS:
        return f"it has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}"
    is_error, messages = _library().LLMatcher.validate_grammar_with_warnings(text, None, limits=_limits())
    return _first_line(messages[0]) if is_error else None


def _checked(text: str, param: str) -> str:
    if (reason := _reason(text)) is not None:
        raise InvalidRequestError(
            f"`{param}`: this grammar cannot be enforced: {reason}", param=param, code=_code(text, Refusal.INVALID)
        )
    return text


def _code(text: str, otherwise: Refusal) -> Refusal:
    return Refusal.TOO_LARGE if len(text) > MAX_GRAMMAR_CHARS else otherwise


def _check_depth(schema: Any, param: str) -> None:
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return
    raise InvalidRequestError(
        f"`{param}`: the JSON schema is nested deeper than {MAX_DEPTH} levels", param=param, code=Refusal.TOO_LARGE
    )


def _locate(schema: Mapping[str, Any], reason: str) -> tuple[str, str]:
    """(path, reason) of the innermost part of a refused schema that is refused by itself."""
    path, part, stop_at = "", schema, time.thread_time() + _MAX_LOCATE_S
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    while True:
        for step, child in _parts(part):
            if time.thread_time() > stop_at:
                return path, reason
            found = _reason(_compile({**shared, **child}))
            if found is not None:
                path, part, reason = f"{path}/{step}", child, found
                break
        else:
            return path, reason


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", part) for i, part in enumerate(schema[key]) if isinstance(part, dict))
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", part) for name, part in schema[key].items() if isinstance(part, dict))


def _first_line(message: str) -> str:
    """The gist of the library's message, which may go on with the whole grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    gist = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return gist.removeprefix("error:").strip()[:300]
