"""Tokenizes text with a cache of prefixes, such as a chat's earlier turns.

Only the rest of a text is encoded.

Decides where a text may be cut without changing its ids. Byte-level tokenizers split a text into
words by a pattern with a lookahead of a few characters, and encode each word separately. All these
patterns split before a space between two letters. The encoding of the whole text is checked for
that split.
"""

import json
import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

import tokenizers

_CHUNK = 256
"""Characters per chunk. Only complete chunks are cached."""
_MAX_CHUNKS = 8192
"""Maximum number of chunks, about 10 MB for ordinary text."""
_MAX_IDS = 512
"""Maximum ids per chunk. A text without cuts for longer is cached only up to there."""
_SLICE = 16_384
"""Characters per encoding call, since listing token offsets holds the GIL. A text without cuts is
encoded in one call."""
_LOOKAHEAD = 32
"""Characters after a cut that may affect it; more if added tokens are longer."""
_SPACE_BETWEEN_LETTERS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_SPACE = "\u0120"
"""A space in byte-level tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A cached chunk. end: the position in the text of the chunk's last cut.

    ids: the ids from the previous chunk's last cut to `end`; empty if the chunk has no cut.
    """

    ids: "array[int]"
    end: int


_Root = tuple[str, bool]
_Key = tuple["_Root | _Chunk", str]


def encoding_of(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """Return `backend.encode`'s result without holding the GIL.

    `encode` holds it to its end, up to 0.5 s for a long text, which would block all streams.
    `encode_batch` does not.
    """
    [encoding] = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


class PrefixEncoder:
    """A tokenizer's `encode` with a cache of chunks, each stored under its predecessor.

    Thread-safe.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """backend: only byte-level tokenizers without a normalizer use the cache."""
        self._backend = backend
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        self._lock = Lock()
        added = backend.get_added_tokens_decoder().values()
        # Two added tokens may overlap; then the second affects the first.
        self._lookahead = max([_LOOKAHEAD, *(2 * len(token.content) + 1 for token in added)])
        plain, special = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        self._special_at_end = special[-len(plain) :] != plain
        # Whether such a token starts at a space depends on the character before it, which a cut
        # removes.
        looks_behind = any(token.single_word and " " in token.content for token in added)
        stage = backend.pre_tokenizer
        self._cuts = not looks_behind and stage is not None and _looks_ahead_only(json.loads(stage.__getstate__()))

    def encode(self, text: str, *, add_special_tokens: bool, scope: str) -> list[int]:
        """Return the tokenizer's token ids. Each `scope` has its own cache entries."""
        if not self._cuts or (add_special_tokens and self._special_at_end):
            return list(encoding_of(self._backend, text, add_special_tokens).ids)
        parent, num_known, ids = self._find(text, (scope, add_special_tokens))
        begin, size = _end(parent), _SLICE
        while begin + size < len(text):
            part = encoding_of(self._backend, text[begin : begin + size], add_special_tokens and begin == 0)
            parent, num_known, num_ids = self._remember(text[: begin + size], part, parent, num_known)
            ids += part.ids[:num_ids]
            if _end(parent) == begin:
                size = len(text)  # no cut: encode the rest in one call
            begin = _end(parent)
        rest = encoding_of(self._backend, text[begin:], add_special_tokens and begin == 0)
        self._remember(text, rest, parent, num_known)
        return ids + rest.ids

    def _find(self, text: str, root: _Root) -> tuple[_Root | _Chunk, int, list[int]]:
        """Return the longest cached prefix: its last chunk, its number of chunks, its ids."""
        parent: _Root | _Chunk = root
        ids: list[int] = []
        found: list[_Key] = []
        with self._lock:
            while (chunk := self._chunks.get(key := (parent, _part(text, len(found))))) is not None:
                ids.extend(chunk.ids)
                found.append(key)
                parent = chunk
            self._keep(found)
        return parent, len(found), ids

    def _remember(
        self, text: str, part: tokenizers.Encoding, parent: _Root | _Chunk, num_known: int
    ) -> tuple[_Root | _Chunk, int, int]:
        """Cache the chunks of `text` after its first `num_known`, of which `parent` is the last.

        part: the encoding of the text after `parent`'s cut.
        Returns the last cached chunk, the new number of chunks, and how many tokens of `part` are
        before its cut.
        """
        num_ids = 0
        added: list[_Key] = []
        new = self._new_chunks(text, part, _end(parent), num_known)
        with self._lock:
            for chunk, tokens_before in new:
                added.append((parent, _part(text, num_known)))
                known = self._chunks.setdefault(added[-1], chunk)
                if known.end != chunk.end:
                    break
                parent, num_known, num_ids = known, num_known + 1, tokens_before
            self._keep(added)
            while len(self._chunks) > _MAX_CHUNKS:
                self._chunks.popitem(last=False)
        return parent, num_known, num_ids

    def _new_chunks(self, text: str, part: tokenizers.Encoding, begin: int, num_known: int) -> list[tuple[_Chunk, int]]:
        """Return the new chunks, each with how many tokens of `part` are before its cut.

        part: the encoding of the text from position `begin` on.
        """
        if num_known >= len(text) // _CHUNK:
            return []
        tokens, index, end = _Tokens(self._backend, part), 0, begin
        new: list[tuple[_Chunk, int]] = []
        for number in range(num_known, len(text) // _CHUNK):
            cut = self._last_cut(text, end + 1, (number + 1) * _CHUNK - self._lookahead)
            following = None if cut is None else tokens.of_word(cut - begin)
            if cut is None or following is None:
                new.append((_Chunk(array("I"), end), index))
            elif following - index > _MAX_IDS:
                break
            else:
                new.append((_Chunk(array("I", tokens.ids[index:following]), cut), following))
                index, end = following, cut
        return new

    def _last_cut(self, text: str, first: int, end: int) -> int | None:
        """Return the last space between letters from `first` up to before `end`."""
        places = [found.start() for found in _SPACE_BETWEEN_LETTERS.finditer(text, max(first, end - _CHUNK), end)]
        return places[-1] if places else None

    def _keep(self, keys: list[_Key]) -> None:
        """Make these the most recently used entries.

        A chunk must outlive its successors, since they are found only through it.
        """
        for key in reversed(keys):
            self._chunks.move_to_end(key)


class _Tokens:
    """The tokens of a text by position."""

    def __init__(self, backend: tokenizers.Tokenizer, encoding: tokenizers.Encoding) -> None:
        self.ids = encoding.ids
        self._backend = backend
        self._encoding = encoding
        self._starts = [start for start, _ in encoding.offsets]

    def of_word(self, space: int) -> int | None:
        """Return the index of the first token of the word after this space.

        None if the tokenizer does not split before the space.
        """
        token = bisect_left(self._starts, space)
        # The offset of the word's first token may exclude the space. A later offset means an added
        # token before it.
        if not 0 < token < len(self.ids) or self._starts[token] > space + 1:
            return None
        if self._encoding.token_to_word(token - 1) == self._encoding.token_to_word(token):
            return None
        text = self._backend.id_to_token(self.ids[token])
        return token if text is not None and text.startswith(_SPACE) else None


def _looks_ahead_only(stage: dict[str, Any]) -> bool:
    """Whether this pre-tokenizer splits only by lookahead and adds no space."""
    match stage["type"]:
        case "Sequence":
            return all(map(_looks_ahead_only, stage["pretokenizers"]))
        case "ByteLevel":
            return not stage["add_prefix_space"]
        case "Split":
            whole_words = stage["behavior"] == "Isolated" or (stage["behavior"] == "Removed" and stage["invert"])
            return whole_words and "(?<" not in stage["pattern"].get("Regex", "")
        case kind:
            return kind in ("Digits", "Punctuation")


def _part(text: str, number: int) -> str:
    return text[number * _CHUNK : (number + 1) * _CHUNK]


def _end(parent: _Root | _Chunk) -> int:
    return parent.end if isinstance(parent, _Chunk) else 0
