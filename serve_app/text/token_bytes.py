"""The bytes one token id stands for, alone: what `logprobs` report. Not used to build text (see `detokenizer`)."""

import json
import re

import tokenizers

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte as GPT-2's byte-level BPE writes them: printable Latin-1 as itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Token id -> bytes for byte-level and SentencePiece-like vocabularies."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known = {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}
        decoder = backend.decoder
        kinds = json.dumps(json.loads(decoder.__getstate__())) if decoder is not None else ""
        self.byte_level = '"ByteLevel"' in kinds

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token: str | None = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            known = self._known[token_id] = self._bytes(token)
        return known

    def _bytes(self, token: str) -> bytes:
        if self.byte_level:
            codes = [_ALPHABET.get(char) for char in token]
            known = bytes(code for code in codes if code is not None)
            return known if len(known) == len(codes) else token.encode()
        if match := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()
