"""llguidance: loaded with the first grammar, called with its limits, and on a stack that its recursion fits."""

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
"""It descends rule by rule and reference by reference: 20 KiB for each 100 characters of a grammar at the most. A
thread's usual 8 MiB end the process at 2,000 rules that refer to one another; memory is used as far as needed."""
_BUILDER = "grammar build"
_starting = Lock()
# ", " and ": " are what models write on one line. Free whitespace would be an invitation to loop in it.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarError(Exception):
    """llguidance refuses a grammar; the text says why."""


def tokenizer(vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> "llguidance.LLTokenizer":
    """llguidance's form of a vocabulary. `eos_token_ids` may come where a text may end."""
    wrapper = _library().TokenizerWrapper(_View(vocabulary, eos_token_ids[0]))
    found: llguidance.LLTokenizer = _library().LLTokenizer(wrapper, eos_token=list(eos_token_ids))
    return found


def from_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON schema. Raises `GrammarError` for what is no JSON."""
    return _text(lambda: _library().LLMatcher.grammar_from_json_schema(dumps(schema), overrides=_JSON_OPTIONS))


def from_regex(pattern: str) -> str:
    """The grammar of a regular expression. Raises `GrammarError` for what is no Unicode text."""
    return _text(lambda: _library().LLMatcher.grammar_from_regex(pattern))


def from_lark(rules: str) -> str:
    """The grammar of rules in llguidance's dialect of Lark. Raises `GrammarError` for what is no Unicode text."""
    return _text(lambda: _library().LLMatcher.grammar_from_lark(rules))


def check(text: str) -> None:
    """Raises `GrammarError` for a grammar that is refused without a look at the vocabulary."""
    validate = _library().LLMatcher.validate_grammar_with_warnings
    is_error, messages = on_deep_stack(lambda: validate(text, None, limits=_limits()))
    if is_error:
        raise GrammarError(first_line(messages[0]))


def matcher(of: "llguidance.LLTokenizer", text: str) -> "llguidance.LLMatcher":
    """A matcher of a grammar, in an error state where it is refused."""
    build = _library().LLMatcher
    found: llguidance.LLMatcher = on_deep_stack(lambda: build(of, text, log_level=0, limits=_limits()))
    return found


def on_deep_stack(call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread of its own; what that thread calls by this way stays in it."""
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
    """Why a matcher cannot go on; None where it can."""
    return first_line(of.get_error()) if of.is_error() else None


def first_line(message: str) -> str:
    """The gist of the library's message, which may go on with the whole grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    gist = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return gist.removeprefix("error:").strip()[:300]


def _text(build: Callable[[], str]) -> str:
    try:
        return build()
    except ValueError as error:  # numbers that JSON does not have, and halves of surrogate pairs
        raise GrammarError(first_line(str(error))) from None


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
