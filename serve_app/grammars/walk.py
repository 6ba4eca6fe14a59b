"""Checks that a grammar has an output, by walking along a short one byte by byte.

It uses bytes instead of tokens, since the result depends only on the grammar, and a mask of 257
tokens takes microseconds. The walk is limited in masks, not in seconds, so a slow machine gets the
same result.
"""

from functools import cache
from typing import TYPE_CHECKING

from serve_app.grammars import library
from serve_app.grammars.token_set import Vocabulary

if TYPE_CHECKING:
    import llguidance

MAX_MASKS = 2_000
_EOS = 256
# Bytes that end something. In a structure the quote is last, because it may also begin a string. In
# free text, where most bytes are allowed, it is first. Other bytes take turns, so that no loop
# blocks the walk.
_CLOSING, _CLOSING_TEXT = b'}])>"', b'"<}])>'
_FREE = 64
_OTHERS = [*dict.fromkeys((*b"0123456789 ntfea", *(byte for byte in range(256) if byte not in b"[{("), *b"({["))]


def dead_end(text: str, max_masks: int = MAX_MASKS) -> str | None:
    """Return what stops a walk through a grammar before its end.

    None if the walk reached the end or took `max_masks` masks. A grammar with tokens of a
    vocabulary is not walked.
    """
    matcher = library.matcher(_bytes(), text)
    if (reason := library.error_of(matcher)) is not None:
        return None if "token" in reason else reason
    written = bytearray()
    times = [0] * 256
    for _ in range(max_masks):
        chosen = matcher.compute_ff_tokens()
        if not chosen:
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error() or not allowed:  # after an error, end is the only allowed token
                return _stop(matcher, written)
            if allowed >> _EOS & 1:
                return None
            chosen = [_next(allowed, times)]
        if not matcher.consume_tokens(chosen):
            return _stop(matcher, written)
        written += bytes(byte for byte in chosen if byte < _EOS)
    return None


def _next(allowed: int, times: list[int]) -> int:
    """Return the byte that is likely on the shortest way to the end. allowed: one bit per byte."""
    closing = _CLOSING_TEXT if allowed.bit_count() > _FREE else _CLOSING
    byte = next((byte for byte in closing if allowed >> byte & 1 and times[byte] < MAX_MASKS // 4), None)
    if byte is None:
        byte = min((byte for byte in _OTHERS if allowed >> byte & 1), key=times.__getitem__)
    times[byte] += 1
    return byte


def _stop(matcher: "llguidance.LLMatcher", written: bytearray) -> str:
    reason = library.error_of(matcher) or ""
    if not reason or "NoExtension" in reason:
        reason = "no text can match it"
    return f"{reason} (after {written[-40:].decode(errors='replace')!r})" if written else reason


@cache
def _bytes() -> "llguidance.LLTokenizer":
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    return library.tokenizer(Vocabulary(tokens, frozenset([_EOS]), lambda text: [*text.encode()]), [_EOS])
