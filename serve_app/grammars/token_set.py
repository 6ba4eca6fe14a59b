"""A tokenizer's vocabulary for grammars, and sets of its ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary for matchers: bytes by id, and control tokens.

    encode: text to ids, without special tokens around it.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    def cut(self, width: int) -> "Vocabulary":
        """Return the vocabulary without ids from `width` on.

        A model with `width` logits cannot generate them.
        """
        if len(self.tokens) <= width:
            return self
        special_ids = frozenset(token_id for token_id in self.special_ids if token_id < width)

        def encode(text: str) -> list[int]:
            ids = self.encode(text)
            # Only a text with an added token has such ids; its single characters have none.
            return ids if max(ids, default=0) < width else [i for char in text for i in self.encode(char)]

        return Vocabulary(self.tokens[:width], special_ids, encode)


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of token ids as bits, lowest first: 1/8 of the size of a bool array."""

    packed: bytes
    width: int
    """Number of ids. Later bits are zero."""

    @classmethod
    def cut(cls, packed: bytes, width: int) -> "TokenSet":
        """Make a set of `width` ids from fewer or more bits."""
        size = -(-width // 8)
        packed = packed[:size].ljust(size, b"\0")
        if beyond := width % 8:
            packed = packed[:-1] + bytes([packed[-1] & ((1 << beyond) - 1)])
        return cls(packed, width)

    def __bool__(self) -> bool:
        return self.packed.count(0) < len(self.packed)

    def __contains__(self, token_id: int) -> bool:
        return token_id < self.width and bool(self.packed[token_id // 8] >> token_id % 8 & 1)

    def only(self, token_id: int) -> "TokenSet":
        """Return the set of `token_id` if it is in this set, else an empty set."""
        bits = np.zeros(self.width, dtype=np.bool_)
        bits[token_id] = token_id in self
        return TokenSet(np.packbits(bits, bitorder="little").tobytes(), self.width)

    def bits(self) -> npt.NDArray[np.bool_]:
        """Return a bool array, [width]."""
        packed = np.frombuffer(self.packed, dtype=np.uint8)
        return np.unpackbits(packed, count=self.width, bitorder="little").view(np.bool_)

    def ids(self) -> list[int]:
        """Return the ids in ascending order."""
        found: list[int] = np.flatnonzero(self.bits()).tolist()
        return found
