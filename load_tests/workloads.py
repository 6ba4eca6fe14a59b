"""The named workloads: which requests, how long, when. Everything follows from a seed.

Decides lengths, texts and arrival times; sends nothing. Lengths depend on the seed alone. Text depends on
(seed, repeat, salt), so that a server's prefix cache never meets the prompt of an earlier repeat.

    mixed          64 requests, 16 at once; prompts log-uniform 16..512, outputs exponential (mean 64) in 4..256
    decode         16 requests at once; 32 in, 128 out
    prefill        32 requests, 8 at once; 1024 in, 1 out
    single         4 requests, one after another; 32 in, 128 out
    first_token    24 requests, one after another; 32 in, 1 out: what `single` says of first tokens, six times over
    shared_prefix  32 requests, 8 at once; 768 tokens shared by all, 32 of their own, 16 out
    repetitive     as single, but the prompt is 32 tokens four times over, so that the answer goes on repeating them
    poisson        open loop: arrivals at `rate` per second for `duration` seconds, lengths as in mixed
    bursty         the same in bursts: the gaps vary four times as much
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from load_tests.arrivals import Arrival, mixed_lengths, random_arrivals
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

WORKLOADS = ("mixed", "decode", "prefill", "single", "first_token", "shared_prefix", "repetitive", "poisson", "bursty")
BURSTY_VARIATION = 4.0

_FIXED: dict[str, tuple[int, int, int, int]] = {
    # name: requests, at once, prompt tokens, output tokens
    "decode": (16, 16, 32, 128),
    "prefill": (32, 8, 1024, 1),
    "single": (4, 1, 32, 128),
    "first_token": (24, 1, 32, 1),
}
_MIXED_REQUESTS, _MIXED_CONCURRENCY = 64, 16
_REPETITIVE_REQUESTS, _PASSAGE_TOKENS, _PASSAGE_TIMES, _REPETITIVE_OUTPUT = 4, 32, 4, 128
_PREFIX_REQUESTS, _PREFIX_CONCURRENCY, _PREFIX_TOKENS, _OWN_TOKENS, _PREFIX_OUTPUT = 32, 8, 768, 32, 16


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to send: its text, its exact length in tokens, how much to ask for, and when (seconds, open loop)."""

    prompt: str
    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent. `concurrency` None means open loop: each at its own time."""

    name: str
    items: tuple[WorkItem, ...]
    concurrency: int | None


class TokenizerLike(Protocol):
    """What is needed of `serve_app.text.tokenizer.Tokenizer`."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class PromptWriter:
    """Writes texts of an exact number of tokens out of words that are one token each."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def words(self) -> list[str]:
        """Lower-case words of the vocabulary that are one token at the start of a text and after a space.

        Raises `ValueError` when the vocabulary has too few for varied prompts.
        """
        decoded = {self.tokenizer.decode([token_id]).strip() for token_id in range(self.tokenizer.vocab_size)}
        candidates = sorted(w for w in decoded if len(w) > 2 and w.isascii() and w.isalpha() and w.islower())
        words = [w for w in candidates if self.count(w) == self.count(" " + w) == 1]
        if len(words) < 100:
            raise ValueError(f"only {len(words)} words of this tokenizer's vocabulary are single tokens")
        return words

    def count(self, text: str) -> int:
        """Tokens of a text, special ones not counted."""
        return len(self.ids(text))

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def num_special(self) -> int:
        """Tokens that the tokenizer adds to every text by itself."""
        return len(self.tokenizer.encode("the")) - self.count("the")

    def write(self, rng: Random, num_tokens: int, after: str = "") -> str:
        """`after` continued by `num_tokens` random words. Raises `ValueError` if it does not encode to that length."""
        text = " ".join(rng.choice(self.words) for _ in range(num_tokens))
        text = f"{after} {text}" if after else text
        wanted = num_tokens + (self.count(after) if after else 0)
        if self.count(text) != wanted:
            raise ValueError(f"the prompt encodes to {self.count(text)} tokens instead of {wanted}")
        return text


def open_writer(tokenizer: str) -> PromptWriter:
    """A writer for a `tokenizer.json`, a folder that holds one, or any model that serve_app can find ("default")."""
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.name == "tokenizer.json" and file.is_file():
        return PromptWriter(Tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file)), file.parent.name))
    return PromptWriter(load_tokenizer(tokenizer))


def build_workload(
    name: str,
    writer: PromptWriter,
    *,
    seed: int = 0,
    repeat: int = 0,
    salt: str = "",
    rate: float = 1.0,
    duration_s: float = 60.0,
    num_requests: int | None = None,
) -> Workload:
    """The workload called `name` (see the module's docstring).

    `num_requests` overrides how many (closed loop only); `rate` and `duration_s` are for `poisson` and `bursty`.
    Raises `ValueError` for an unknown name.
    """
    lengths = Random(f"len-{name}-{seed}")
    texts = Random(f"text-{name}-{seed}-{repeat}-{salt}")

    def item(prompt_tokens: int, output_tokens: int) -> WorkItem:
        return WorkItem(writer.write(texts, prompt_tokens), prompt_tokens, output_tokens)

    if name == "mixed":
        shapes = [mixed_lengths(lengths) for _ in range(num_requests or _MIXED_REQUESTS)]
        return Workload(name, tuple(item(*shape) for shape in shapes), _MIXED_CONCURRENCY)
    if name in _FIXED:
        count, concurrency, prompt_tokens, output_tokens = _FIXED[name]
        items = tuple(item(prompt_tokens, output_tokens) for _ in range(num_requests or count))
        return Workload(name, items, concurrency)
    if name == "shared_prefix":
        return _shared_prefix(writer, texts, num_requests or _PREFIX_REQUESTS)
    if name == "repetitive":
        return _repetitive(writer, texts, num_requests or _REPETITIVE_REQUESTS)
    if name in ("poisson", "bursty"):
        variation = BURSTY_VARIATION if name == "bursty" else 1.0
        return open_workload(name, writer, random_arrivals(lengths, rate, duration_s, variation), texts)
    raise ValueError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")


def read_names(text: str) -> dict[str, int | None]:
    """Workloads as commands take them: names separated by commas, `name:count` for another number of requests.

    Raises `ValueError` for an unknown name or a count that is none.
    """
    wanted: dict[str, int | None] = {}
    for part in text.split(","):
        name, colon, count = part.partition(":")
        if name not in WORKLOADS:
            raise ValueError(f"{name!r} is none of {', '.join(WORKLOADS)}")
        if colon and not (count.isdecimal() and int(count)):
            raise ValueError(f"{part!r}: {count!r} is no number of requests")
        wanted[name] = int(count) if colon else None
    return wanted


def open_workload(name: str, writer: PromptWriter, arrivals: Iterable[Arrival], texts: Random) -> Workload:
    """An open-loop workload: each arrival with a text of its own."""
    items = (WorkItem(writer.write(texts, a.prompt_tokens), a.prompt_tokens, a.output_tokens, a.at_s) for a in arrivals)
    return Workload(name, tuple(items), None)


def _shared_prefix(writer: PromptWriter, texts: Random, count: int) -> Workload:
    prefix = writer.write(texts, _PREFIX_TOKENS)
    items = tuple(
        WorkItem(writer.write(texts, _OWN_TOKENS, after=prefix), _PREFIX_TOKENS + _OWN_TOKENS, _PREFIX_OUTPUT)
        for _ in range(count)
    )
    return Workload("shared_prefix", items, _PREFIX_CONCURRENCY)


def _repetitive(writer: PromptWriter, texts: Random, count: int) -> Workload:
    items = []
    for _ in range(count):
        prompt = " ".join([writer.write(texts, _PASSAGE_TOKENS)] * _PASSAGE_TIMES)
        items.append(WorkItem(prompt, writer.count(prompt), _REPETITIVE_OUTPUT))
    return Workload("repetitive", tuple(items), 1)
