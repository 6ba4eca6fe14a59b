"""What a client may ask of the HTTP layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Sizes in bytes, times in seconds. What has a setting has no default here."""

    max_body_bytes: int
    max_buffered_bytes: int = 64 * 2**20
    """Bodies of all requests at the server at one time; beyond it new large ones are refused as overload."""
    max_uploads: int = 128
    """Bodies of which a part has arrived and a part has not, at one time."""
    max_header_bytes: int = 16 * 2**10
    body_timeout_s: float
    max_sequences: int = 128
    """Prompts times choices of one HTTP request."""
    max_logprobs: int = 2**18
    """Output tokens (of all choices) times their alternatives and themselves that one answer may carry."""
    max_prompt_logprobs: int = 2**16
    """Echoed prompt tokens (of all choices) times alternatives that one answer may carry (`echo` with `logprobs`)."""
    max_embedding_numbers: int = 2**22
    """Inputs times dimensions of one answer: 16 MiB, in base64 22."""
    request_timeout_s: float
    """The most that a request may take, and the most that it may ask for with `x-request-timeout`."""
