"""Limits of the HTTP layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Sizes in bytes, times in seconds. Limits that are settings have no default here."""

    max_body_bytes: int
    max_buffered_bytes: int = 64 * 2**20
    """Size of all request bodies in memory. Beyond it, new large bodies are refused as overload."""
    max_uploads: int = 128
    """Bodies that have arrived in part, at any time."""
    max_header_bytes: int = 16 * 2**10
    body_timeout_s: float
    max_sequences: int = 128
    """Prompts times choices in one HTTP request."""
    max_logprobs: int = 2**18
    """Log-probabilities of output tokens in one answer: tokens of all choices times (alternatives +
    1)."""
    max_prompt_logprobs: int = 2**16
    """Log-probabilities of echoed prompt tokens in one answer (`echo` with `logprobs`), over all
    choices."""
    max_embedding_numbers: int = 2**22
    """Inputs times dimensions in one answer: 16 MiB as floats, 22 MiB in base64."""
    request_timeout_s: float
    """The default and the maximum request timeout (`x-request-timeout`)."""
