"""Fields of answers beyond OpenAI's, in vLLM's format.

These are `stop_reason` (always), token ids and prompt log-probabilities (if requested). The wires
decide where in the answer the fields are.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.endpoint import Choice
from serve_app.api.generation import Generation
from serve_app.core.results import FinishReason, TokenLogprob
from serve_app.text.stream import TextPiece
from serve_app.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""OpenAI's value for a nearly impossible token; JSON has no infinity."""


class Details:
    """The additional fields of one request's answer."""

    def __init__(self, body: GenerationBody, generation: Generation, tokenizer: Tokenizer) -> None:
        self._stop_token_ids = frozenset(body.stop_token_ids or ())
        self._with_token_ids = bool(body.return_token_ids)
        self._num_top = body.prompt_logprobs
        self._generation = generation
        self._tokenizer = tokenizer

    def of_choice(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a finished choice."""
        reason = self._stop_reason(choice.token_ids, choice.finish_reason, choice.stop_string)
        ids = {"token_ids": choice.token_ids} if self._with_token_ids else {}
        return {"stop_reason": reason, **ids}

    def has_ids(self, piece: TextPiece) -> bool:
        """Whether the piece has ids to send. It may have no text."""
        return self._with_token_ids and bool(piece.token_ids)

    def of_piece(self, piece: TextPiece) -> bytes:
        """Return the fields of a streamed choice as JSON, each with a comma before it."""
        fields = b"" if not self._with_token_ids else b',"token_ids":' + orjson.dumps(piece.token_ids)
        if piece.finish_reason is None:
            return fields
        reason = self._stop_reason(piece.token_ids, piece.finish_reason, piece.stop_string)
        return b',"stop_reason":' + orjson.dumps(reason) + fields

    def of_prompt(self, prompt: int) -> dict[str, Any]:
        """Return the fields of a prompt, which are equal in all its choices."""
        fields: dict[str, Any] = {}
        if self._num_top is not None:
            entries = self._generation.prompt_logprobs[prompt]
            fields["prompt_logprobs"] = [None, *(self._candidates(entry, self._num_top) for entry in entries)]
        if self._with_token_ids:
            fields["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        return fields

    def of_prompt_json(self, prompt: int) -> bytes:
        """Return `of_prompt` as JSON, each field with a comma before it."""
        return b"".join(b',"%b":%b' % (name.encode(), orjson.dumps(v)) for name, v in self.of_prompt(prompt).items())

    def _stop_reason(self, token_ids: Sequence[int], finish_reason: str, stop_string: str | None) -> str | int | None:
        if stop_string is not None or finish_reason != FinishReason.STOP:
            return stop_string
        return token_ids[-1] if token_ids and token_ids[-1] in self._stop_token_ids else None

    def _candidates(self, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
        """Return the prompt token and the likeliest tokens by id.

        Only the likeliest have a rank.
        """
        top = entry.top[:num_top]
        found: dict[int, tuple[float, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(top, 1)
        }
        found.setdefault(entry.token_id, (entry.logprob, None))
        text = self._tokenizer.token_bytes
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": rank,
                "decoded_token": text(token_id).decode(errors="replace"),
            }
            for token_id, (logprob, rank) in found.items()
        }
