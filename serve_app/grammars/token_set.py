"""A vocabulary as grammars see it, and which of its ids may come next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a matcher must know of the tokenizer: each id's bytes, and which ids are control tokens.

    encode: text to ids, without special tokens around it.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    def cut(self, width: int) -> "Vocabulary":
        """Without ids from `width` on, which no model of so many logits generates."""
        if len(self.tokens) <= width:
            return self
        special_ids = frozenset(token_id for token_id in self.special_ids if token_id < width)

        def encode(text: str) -> list[int]:
            ids = self.encode(text)
            # Only a text that an added token is written in has such ids. Its characters alone have none.
            return ids if max(ids, default=0) < width else [i for char in text for i in self.encode(char)]

        return Vocabulary(self.tokens[:width], special_ids, encode)


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Ids of a vocabulary, a bit for each, lowest bit first: an eighth of what a bool array would move about."""

    packed: bytes
    width: int
    """How many ids there are; later bits are zero."""

    @classmethod
    def cut(cls, packed: bytes, width: int) -> "TokenSet":
        """From bits that may be fewer or more than `width`."""
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
        """Without all others."""
        bits = np.zeros(self.width, dtype=np.bool_)
        bits[token_id] = token_id in self
        return TokenSet(np.packbits(bits, bitorder="little").tobytes(), self.width)

    def bits(self) -> npt.NDArray[np.bool_]:
        """[width]."""
        packed = np.frombuffer(self.packed, dtype=np.uint8)
        return np.unpackbits(packed, count=self.width, bitorder="little").view(np.bool_)

    def ids(self) -> list[int]:
        """Ascending."""
        found: list[int] = np.flatnonzero(self.bits()).tolist()
        return found
