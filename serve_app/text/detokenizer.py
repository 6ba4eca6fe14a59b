"""Converts token ids to text, one id at a time, without splitting characters.

A text is the bytes of its tokens, decoded as UTF-8. A byte that is part of no character becomes
U+FFFD as soon as that is known. So emitted text never changes, and pieces add up to the whole text,
for any ids. Stop conditions are handled elsewhere.
"""

import codecs
from collections.abc import Container, Sequence

from serve_app.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
"""Replaces bytes that are not UTF-8."""
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one growing sequence. Ids outside the vocabulary have no text. Never raises.

    Vocabularies that mark word starts (SentencePiece) drop the space before a text's first word,
    but not if the text continues a prompt that ends with text.
    """

    def __init__(
        self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int] = (), *, hidden_ids: Container[int] = ()
    ) -> None:
        """hidden_ids: ids without text."""
        self._bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._decoder = _utf8("replace")
        continued = any(token_bytes(i) for i in prompt_token_ids[-1:] if i not in hidden_ids)
        self._drops_space = token_bytes.drops_space and not continued

    def step(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        if token_id in self._hidden_ids:
            return ""
        text = self._decoder.decode(self._bytes(token_id))
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return U+FFFD for the remaining bytes of an incomplete character."""
        return self._decoder.decode(b"", final=True)
