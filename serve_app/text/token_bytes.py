"""The bytes that one token id adds to a text, which is decoded as UTF-8 (see `detokenizer`)."""

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_SPACE_MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}


def _byte_level_alphabet() -> dict[str, int]:
    """Return character -> byte of GPT-2's byte-level BPE.

    Printable Latin-1 is written as itself, the rest from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Returns the bytes of a token id. Never raises.

    Byte-level and SentencePiece-like vocabularies are decoded here, because the library returns a
    character's bytes only when all have arrived. For other kinds, a token's text is what the
    library adds for it after a letter.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known = {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}
        stages = _stages(backend)
        kinds = [stage["type"] for stage in stages]
        self.byte_level = "ByteLevel" in kinds
        marked = "Metaspace" in kinds or _SPACE_MARK_TO_SPACE in stages
        self._by_library = not self.byte_level and not marked
        self._suffix = next((stage["suffix"] for stage in stages if stage["type"] == "BPEDecoder"), "")
        self._anchor: list[int] = backend.encode("a", add_special_tokens=False).ids[-1:] if self._by_library else []
        self.drops_space = self._puts_space_between() or any(map(_drops_space, stages))
        """Whether the space before a text's first word is dropped."""

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of this id; empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            known = self._known[token_id] = self._bytes(token_id, token)
        return known

    def _puts_space_between(self) -> bool:
        """Whether the library adds spaces between words, as for WordPiece."""
        text, twice = (self._backend.decode(self._anchor * count) for count in (1, 2))
        return twice[len(text) :].startswith(" ") and not text.startswith(" ")

    def _bytes(self, token_id: int, token: str) -> bytes:
        if self.byte_level:
            codes = [_ALPHABET.get(char) for char in token]
            known = bytes(code for code in codes if code is not None)
            return known if len(known) == len(codes) else token.encode()
        if self._suffix:
            return token.replace(self._suffix, " ").encode()
        if self._by_library:
            before = self._backend.decode(self._anchor)
            return self._backend.decode([*self._anchor, token_id])[len(before) :].encode()
        match = _BYTE_FALLBACK.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode()


def _stages(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's stages in order."""
    decoder = backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    stages: list[dict[str, Any]] = state.get("decoders", [state] if state else [])
    return stages


def _drops_space(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Metaspace":
        return stage.get("prepend_scheme") != "never"
    return stage["type"] == "Strip" and stage["content"] == " " and bool(stage["start"])
