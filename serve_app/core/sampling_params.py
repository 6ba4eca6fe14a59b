"""Sampling parameters of a request, validated at construction."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self, get_args

from serve_app.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_CHARS = 2**18

Pooling = Literal["last", "mean"]
"""Pooling of a prompt's embedding: the final hidden state of its last token, or the mean over all
tokens."""

_SET_BY_ENDPOINT = (
    "max_tokens", "seed", "bad_words", "logprobs", "prompt_logprobs", "prompt_logprobs_from", "grammar",
    "thinking_budget", "pooling", "dimensions",
)  # fmt: skip
"""Fields whose meaning or default depends on the endpoint."""


class ThinkingBudget(NamedTuple):
    """At most `max_tokens` of reasoning between the marks `open` and `close`.

    Then `close` is forced. `open` is empty if the prompt already opened the reasoning.
    """

    max_tokens: int
    open: str
    close: str


def _refuse(param: str, value: object, limit: str) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return InvalidRequestError(f"`{param}` must be {limit}, got {shown}", param=param)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; integers if `low` is one. open_low: excludes `low`."""

    low: float
    high: float
    open_low: bool = False

    @property
    def is_integral(self) -> bool:
        """Whether the range contains integers only."""
        return isinstance(self.low, int)

    def check(self, param: str, value: Any) -> None:
        """Raise `InvalidRequestError` unless `value` is in the range."""
        good = isinstance(value, int if self.is_integral else int | float) and not isinstance(value, bool)
        if good and self.low <= value <= self.high and not (self.open_low and value == self.low):
            return
        if self.is_integral:
            raise _refuse(param, value, f"an integer from {self.low} to {self.high}")
        above, up = ("above", "up ") if self.open_low else ("from", "")
        raise _refuse(param, value, f"a number {above} {self.low:g} {up}to {self.high:g}")


RANGES: Mapping[str, Range] = {
    "n": Range(1, MAX_CHOICES),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.01, 10.0),  # less could overflow
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "seed": Range(-(2**63), 2**63 - 1),
    "logprobs": Range(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs_from": Range(1, 2**31 - 1),
    "dimensions": Range(1, 2**31 - 1),
}
"""Ranges of the numeric fields."""

MEANINGS: Mapping[str, str] = {
    "n": "Number of choices; they share the prompt's KV blocks.",
    "temperature": "0 is greedy.",
    "top_p": "Nucleus sampling.",
    "top_k": "Sample among the k most likely tokens; 0 and -1 switch it off.",
    "min_p": "Lowest probability, as a part of the most likely token's.",
    "repetition_penalty": "Divides the logits of tokens that the prompt or output contains; 1 switches it off.",
    "presence_penalty": "Subtracted from the logits of tokens that the output contains.",
    "frequency_penalty": "Subtracted from a token's logit for each occurrence in the output.",
    "ignore_eos": "Generate up to `max_tokens`, past the model's end tokens; for benchmarks.",
}
"""Descriptions for /openapi.json and docs/fields.md, of fields that requests set directly."""

BIASES = Range(-100.0, 100.0)
_TOKEN_IDS = Range(0, 2**31 - 1)
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "dimensions")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. Construction raises `InvalidRequestError` naming field and limit.

    - temperature: 0 is greedy.
    - `top_k`: 0 or -1 disables top-k.
    - `logprobs`: None = none, 0 = the sampled token's, k = also the k most likely.
    - `prompt_logprobs`: the same for each prompt token from index `prompt_logprobs_from` on (index
      0 has none).
    - `seed`: None = drawn by the engine, because noise is a function of (seed, choice, position).
    - `max_tokens`: None = as many as the context allows.
    - `logit_bias`: (token id, bias) pairs.
    - `allowed_token_ids`: only these are sampled, unless empty.
    - `bad_words`: sequences of token ids that must not occur in the output.
    - `grammar` (see `serve_app.grammars`): constrains the output and decides where it ends.
    - `thinking_budget`: limits the reasoning that the grammar allows before the answer.
    - `pooling`: compute the prompt's embedding, reduced to its first `dimensions` numbers (None:
      all); see `for_embedding`.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    grammar: str | None = None
    thinking_budget: ThinkingBudget | None = None
    pooling: Pooling | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        for name, numbers in RANGES.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                numbers.check(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        self._check_token_ids()
        self._check_grammar()
        self._check_pooling()

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.pooling not in get_args(Pooling):
            raise _refuse("pooling", self.pooling, f"one of {', '.join(get_args(Pooling))}")
        if (self.n, self.max_tokens) != (1, 1):
            raise InvalidRequestError("`pooling` requires `n` 1 and `max_tokens` 1", param="pooling")

    def _check_token_ids(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _refuse("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias:
            _TOKEN_IDS.check("logit_bias", token_id)
            BIASES.check(f"logit_bias.{token_id}", bias)
        lists = {
            "stop_token_ids": (self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            "allowed_token_ids": (self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
        }
        for name, (ids, most) in lists.items():
            if len(ids) > most:
                raise _refuse(name, len(ids), f"at most {most} ids")
            for token_id in ids:
                _TOKEN_IDS.check(name, token_id)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise _refuse("bad_words", len(self.bad_words), f"at most {MAX_BAD_WORDS} words")
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
                raise _refuse("bad_words", word, f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens")
            for token_id in word:
                _TOKEN_IDS.check("bad_words", token_id)

    def _check_grammar(self) -> None:
        grammar: Any = self.grammar
        if grammar is None:
            if self.thinking_budget is not None:
                raise InvalidRequestError("`thinking_budget` needs a `grammar`", param="thinking_budget")
            return
        if not isinstance(grammar, str) or not 0 < len(grammar) <= MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"`grammar` must be a text of 1 to {MAX_GRAMMAR_CHARS} characters", param="grammar"
            )
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"`{name}` cannot be combined with a grammar, which decides when the output ends", param=name
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen, without noise."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of the next token depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are modified, other than by `min_tokens`."""
        edits = self.logit_bias or self.allowed_token_ids or self.bad_words or self.grammar is not None
        return bool(self.has_penalties or edits)

    @property
    def needs_last_token(self) -> bool:
        """Whether the allowed next tokens depend on the last token's id on the host."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def wants_prompt_results(self) -> bool:
        """Whether prompt tokens have results, so that they must be computed, not cached."""
        return self.prompt_logprobs is not None

    @property
    def wants_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, without the prefix cache."""
        return self.pooling == "mean" or (self.wants_prompt_results and self.prompt_logprobs_from == 1)

    @classmethod
    def for_embedding(cls, pooling: Pooling, dimensions: int | None = None) -> Self:
        """Return parameters for an embedding. The engine samples one token, which is ignored."""
        return cls(max_tokens=1, temperature=0.0, seed=0, pooling=pooling, dimensions=dimensions)

    @classmethod
    def client_fields(cls) -> dict[str, type]:
        """Return name and type of the fields that a request sets directly.

        The endpoint derives the others.
        """
        return {field.name: field.type for field in fields(cls) if field.name not in _SET_BY_ENDPOINT}  # type: ignore[misc]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if a token id exceeds the logits (`vocab_size` wide)."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_words", [token_id for word in self.bad_words for token_id in word]),
            ("logit_bias", [i for i, _ in self.logit_bias]),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise _refuse(name, token_id, f"a token id below {vocab_size}")

    def check_dimensions(self, hidden_size: int) -> None:
        """Raise `InvalidRequestError` if `dimensions` exceeds the model's hidden size."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise _refuse(
                "dimensions", self.dimensions, f"at most {hidden_size}, the length of this model's embeddings"
            )

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "SamplingParams":
        """Return the params of `to_wire`'s data. Lists become tuples again."""
        values = {name: as_tuple(value) for name, value in data.items()}
        if (budget := values.get("thinking_budget")) is not None:
            values["thinking_budget"] = ThinkingBudget(*budget)
        return cls(**values)


def as_tuple(value: Any) -> Any:
    """Return `value` with its lists replaced by tuples, at any depth."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value
