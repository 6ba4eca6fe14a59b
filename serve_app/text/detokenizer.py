"""Token ids to text, one id at a time, without tearing a character. Decides nothing about stopping.

`tokenizers.decoders.DecodeStream` does the work; this adds an end (`flush`) and a bound on what it may hold back.
"""

from collections.abc import Container, Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
"""What stands in a text for bytes that are no character."""
_MAX_HELD = 32
"""No character needs this many tokens: a longer run without text is garbage and is shown as it decodes."""


class Detokenizer:
    """The text of one growing sequence, by default without special tokens; ids outside the vocabulary have no text.

    The prompt's last id gives the decoder its context: tokenizers that mark word starts (SentencePiece) would
    otherwise drop the space in front of the first word of a continuation.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        hidden_ids: Container[int] = (),
    ) -> None:
        """hidden_ids: have no text, whatever `skip_special_tokens` says of them."""
        self._backend = backend
        self._skip = skip_special_tokens
        self._hidden_ids = hidden_ids
        context = list(prompt_token_ids[-1:])
        # A half character as context would come out again as part of the answer.
        self._context = [] if REPLACEMENT in self._decode(context) else context
        self._held: list[int] = []
        self._stream = self._new_stream()

    def step(self, token_id: int) -> str:
        """The text this id completes; empty while a character is unfinished."""
        if token_id in self._hidden_ids:
            return ""
        piece: str | None = self._stream.step(self._backend, token_id)
        self._held.append(token_id)
        if piece is None:
            return self._restart() if len(self._held) >= _MAX_HELD else ""
        self._context, self._held = self._held, []
        return piece

    def flush(self) -> str:
        """The text of the ids that never became whole characters (with U+FFFD for the broken ones)."""
        return self._restart() if self._held else ""

    def _restart(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._held)[len(before) :]
        self._held = []
        self._stream = self._new_stream()
        return text

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text
