"""Text to ids with a memory for beginnings: of a chat's next turn, or of a prompt that others share the start of, only
the rest is encoded.

Decides where a text may be cut so that its parts have the ids of the whole. Byte-level tokenizers cut a text into words
by a pattern that looks a few characters ahead, and encode each word by itself. Between two letters, before a space,
every such pattern cuts; that it did is read from the encoding of the whole.
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
"""Characters that must be equal to be found. A text's last, incomplete chunk is not remembered."""
_MAX_CHUNKS = 8192
"""About 10 MB, for ordinary text."""
_MAX_IDS = 512
"""Of a chunk: a text that goes on without cuts for longer is remembered up to there."""
_SLICE = 16_384
"""Characters to encode at a time, as listing where their tokens stand holds the interpreter. Where a text has no cuts
it is encoded in one piece."""
_LOOKAHEAD = 32
"""So many characters behind a cut may decide about it, or twice as many as the longest added token has."""
_SPACE_BETWEEN_LETTERS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_SPACE = "\u0120"
"""How byte-level tokens write a space."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """The ids between the last cut before this chunk and `end`, its own last cut, a place in the text; no ids where it
    has no cut of its own."""

    ids: "array[int]"
    end: int


_Root = tuple[str, bool]
_Key = tuple["_Root | _Chunk", str]


def encoding_of(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """What `backend.encode` gives. That holds the interpreter until it ends, half a second for a long text, and every
    stream of the process would pause; encoding a batch does not.
    """
    [encoding] = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


class PrefixEncoder:
    """A tokenizer's `encode` that remembers the chunks of texts, each below the one before. Any thread may call it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """For byte-level tokenizers without a normalizer."""
        self._backend = backend
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        self._lock = Lock()
        added = backend.get_added_tokens_decoder().values()
        # Two may overlap, and then the second decides about the first.
        self._lookahead = max([_LOOKAHEAD, *(2 * len(token.content) + 1 for token in added)])
        plain, special = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        self._special_at_end = special[-len(plain) :] != plain
        # What stands before a space would decide, in the whole only, whether such a token begins there.
        looks_behind = any(token.single_word and " " in token.content for token in added)
        stage = backend.pre_tokenizer
        self._cuts = not looks_behind and stage is not None and _looks_ahead_only(json.loads(stage.__getstate__()))

    def encode(self, text: str, *, add_special_tokens: bool, scope: str) -> list[int]:
        """Token ids, as the tokenizer's own. What is remembered in one scope is not found in another."""
        if not self._cuts or (add_special_tokens and self._special_at_end):
            return list(encoding_of(self._backend, text, add_special_tokens).ids)
        parent, num_known, ids = self._find(text, (scope, add_special_tokens))
        begin, size = _end(parent), _SLICE
        while begin + size < len(text):
            part = encoding_of(self._backend, text[begin : begin + size], add_special_tokens and begin == 0)
            parent, num_known, num_ids = self._remember(text[: begin + size], part, parent, num_known)
            ids += part.ids[:num_ids]
            if _end(parent) == begin:
                size = len(text)  # nowhere to go on from: the rest in one piece
            begin = _end(parent)
        rest = encoding_of(self._backend, text[begin:], add_special_tokens and begin == 0)
        self._remember(text, rest, parent, num_known)
        return ids + rest.ids

    def _find(self, text: str, root: _Root) -> tuple[_Root | _Chunk, int, list[int]]:
        """The deepest chunk of the text that is remembered, how many there are, and the ids before its cut."""
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
        """Remember the chunks of the text beyond the `num_known` down to `parent`, from whose cut on `part` goes.

        The deepest chunk, how many there are now, and how many tokens of `part` stand before its cut.
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
        """Each with the number of tokens of `part`, which begins at that place in the text, before its cut."""
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
        """The last space between letters at `first` or later that has the characters behind it before `end`."""
        places = [found.start() for found in _SPACE_BETWEEN_LETTERS.finditer(text, max(first, end - _CHUNK), end)]
        return places[-1] if places else None

    def _keep(self, keys: list[_Key]) -> None:
        """Forget these last, and of them the deeper ones first, which are never found without the others."""
        for key in reversed(keys):
            self._chunks.move_to_end(key)


class _Tokens:
    """The tokens of a text by their places."""

    def __init__(self, backend: tokenizers.Tokenizer, encoding: tokenizers.Encoding) -> None:
        self.ids = encoding.ids
        self._backend = backend
        self._encoding = encoding
        self._starts = [start for start, _ in encoding.offsets]

    def of_word(self, space: int) -> int | None:
        """The first token of the word that begins with the space there; None if the tokenizer has not cut before it."""
        token = bisect_left(self._starts, space)
        # Its own place may be said to begin behind the space. Any later one begins behind an added token.
        if not 0 < token < len(self.ids) or self._starts[token] > space + 1:
            return None
        if self._encoding.token_to_word(token - 1) == self._encoding.token_to_word(token):
            return None
        text = self._backend.id_to_token(self.ids[token])
        return token if text is not None and text.startswith(_SPACE) else None


def _looks_ahead_only(stage: dict[str, Any]) -> bool:
    """Whether this pre-tokenizer cuts by what follows alone and adds no space."""
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
