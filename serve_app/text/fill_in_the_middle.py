"""Builds fill-in-the-middle prompts, for models whose tokenizers have tokens for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

# The tokens before the prefix, before the suffix and before the answer.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """The token ids of the marks."""

    before: int
    behind: int
    answer: int

    @classmethod
    def find(cls, token_id: Callable[[str], int | None]) -> Self | None:
        """Return the marks of this vocabulary, or None if it has none."""
        for marks in _MARKS:
            ids = [found for mark in marks if (found := token_id(mark)) is not None]
            if len(ids) == len(marks):
                return cls(*ids)
        return None

    def prompt(self, before: Sequence[int], behind: Sequence[int], begin_id: int | None) -> list[int]:
        """Return the prompt for the text between `before` and `behind`.

        A leading `begin_id` stays first.
        """
        begin = [begin_id] if begin_id is not None and [*before[:1]] == [begin_id] else []
        return [*begin, self.before, *before[len(begin) :], self.behind, *behind, self.answer]
