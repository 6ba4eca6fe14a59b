"""Loads llguidance with the first grammar, and calls it with limits and a large enough stack."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from json import dumps
from threading import Lock, Thread, current_thread, stack_size
from typing import TYPE_CHECKING, Any, TypeVar

from serve_app.grammars.token_set import Vocabulary

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")
_STACK_BYTES = 2**28
"""llguidance recurses per rule and reference: at most 20 KiB of stack per 100 characters of a
grammar. A thread's usual 8 MiB crash the process at 2,000 rules that refer to one another. Only the
used part of the stack takes memory."""
_BUILDER = "grammar build"
_starting = Lock()
# Models write ", " and ": " in JSON on one line. With free white space they could repeat it
# endlessly.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(Exception):
    """llguidance refuses a grammar. The message says why."""


def tokenizer(vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> "llguidance.LLTokenizer":
    """Convert a vocabulary for llguidance. `eos_token_ids` are allowed where a text may end."""
    wrapper = _library().TokenizerWrapper(_View(vocabulary, eos_token_ids[0]))
    found: llguidance.LLTokenizer = _library().LLTokenizer(wrapper, eos_token=list(eos_token_ids))
    return found


def from_schema(schema: Mapping[str, Any]) -> str:
    """Return the grammar of a JSON schema. Raises `GrammarError` if it is not JSON."""
    return _text(lambda: _library().LLMatcher.grammar_from_json_schema(dumps(schema), overrides=_JSON_OPTIONS))


def from_regex(pattern: str) -> str:
    """Return the grammar of a regular expression.

    Raises `GrammarError` if it is not Unicode text.
    """
    return _text(lambda: _library().LLMatcher.grammar_from_regex(pattern))


def from_lark(rules: str) -> str:
    """Return the grammar of rules in llguidance's Lark dialect.

    Raises `GrammarError` if it is not Unicode text.
    """
    return _text(lambda: _library().LLMatcher.grammar_from_lark(rules))


def check(text: str) -> None:
    """Raise `GrammarError` if llguidance refuses a grammar. This check ignores the vocabulary."""
    validate = _library().LLMatcher.validate_grammar_with_warnings
    is_error, messages = on_deep_stack(lambda: validate(text, None, limits=_limits()))
    if is_error:
        raise GrammarError(first_line(messages[0]))


def matcher(of: "llguidance.LLTokenizer", text: str) -> "llguidance.LLMatcher":
    """Return a matcher of a grammar. It is in an error state if llguidance refuses the grammar."""
    build = _library().LLMatcher
    found: llguidance.LLMatcher = on_deep_stack(lambda: build(of, text, log_level=0, limits=_limits()))
    return found


def on_deep_stack(call: Callable[[], T]) -> T:
    """Run `call` in a thread with a large stack, and return its result or raise its exception.

    A nested call runs in the same thread.
    """
    if current_thread().name == _BUILDER:
        return call()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    with _starting:
        before = stack_size(_STACK_BYTES)
        try:
            thread = Thread(target=run, name=_BUILDER, daemon=True)
            thread.start()
        finally:
            stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def error_of(of: "llguidance.LLMatcher") -> str | None:
    """Return why a matcher cannot continue; None if it can."""
    return first_line(of.get_error()) if of.is_error() else None


def first_line(message: str) -> str:
    """Return the main line of llguidance's message, which may contain the whole grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    gist = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return gist.removeprefix("error:").strip()[:300]


def _text(build: Callable[[], str]) -> str:
    try:
        return build()
    except ValueError as error:  # numbers outside JSON, and lone surrogates
        raise GrammarError(first_line(str(error))) from None


class _View:
    """A vocabulary with the attributes that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def _library() -> Any:
    # Loaded with the first grammar, since models also run without it.
    import llguidance

    return llguidance


@cache
def _limits() -> "llguidance.LLParserLimits":
    limits: llguidance.LLParserLimits = _library().LLParserLimits(verbose_errors=False)
    return limits
