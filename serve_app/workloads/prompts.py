"""Prompts of an exact number of tokens, written in a model's own vocabulary."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Protocol


class TokenizerLike(Protocol):
    """The part of `serve_app.text.tokenizer.Tokenizer` that is needed here."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""


class PromptWriter:
    """Writes texts of an exact number of tokens, from words that are one token each."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def words(self) -> list[str]:
        """Lower-case words that are one token, both at the start of a text and after a space.

        Raises `ValueError` if the vocabulary has too few for varied prompts.
        """
        decoded = {self.tokenizer.decode([token_id]).strip() for token_id in range(self.tokenizer.vocab_size)}
        candidates = sorted(w for w in decoded if len(w) > 2 and w.isascii() and w.isalpha() and w.islower())
        words = [w for w in candidates if self.count(w) == self.count(" " + w) == 1]
        if len(words) < 100:
            raise ValueError(f"only {len(words)} words of this tokenizer's vocabulary are single tokens")
        return words

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special ones."""
        return len(self.ids(text))

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def num_special(self) -> int:
        """Number of special tokens that the tokenizer adds to every text."""
        return len(self.tokenizer.encode("the")) - self.count("the")

    def write(self, rng: Random, num_tokens: int, after: str = "") -> str:
        """Return `after` continued by `num_tokens` random words.

        Raises `ValueError` if the text does not encode to that length.
        """
        text = " ".join(rng.choice(self.words) for _ in range(num_tokens))
        text = f"{after} {text}" if after else text
        wanted = num_tokens + (self.count(after) if after else 0)
        if self.count(text) != wanted:
            raise ValueError(f"the prompt encodes to {self.count(text)} tokens instead of {wanted}")
        return text


def open_writer(tokenizer: str) -> PromptWriter:
    """Return a writer for a `tokenizer.json`, its folder, or any model that serve_app can find.

    "default" is such a model.
    """
    # Imported here because transformers is slow to import, and `serve-app --help` imports this
    # module.
    from transformers import PreTrainedTokenizerFast

    from serve_app.text.tokenizer import Tokenizer, load_tokenizer

    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.name == "tokenizer.json" and file.is_file():
        return PromptWriter(Tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file)), file.parent.name))
    return PromptWriter(load_tokenizer(tokenizer))
