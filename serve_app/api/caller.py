"""What a request's headers say beside its body: whose it is, how long it may take, which conversation it belongs to."""

import re
import secrets
from hashlib import blake2b

from starlette.datastructures import Headers

from serve_app.api.schemas import GenerationBody
from serve_app.errors import InvalidRequestError

MAX_SESSION_CHARS = 256

_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?", re.ASCII)
_SALT = secrets.token_bytes(16)


def client_of(headers: Headers, body: GenerationBody) -> tuple[str, str]:
    """(API key, user) among whom the queue is fair; the key as a digest that tells nothing outside this process.

    Users are shares of their key's share, so naming many gains nothing. Without a key, and without a user, requests
    share one client: an address would name a proxy, or everybody behind one.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip() or scheme or headers.get("x-api-key", "")
    return blake2b(key.encode(), digest_size=16, key=_SALT).hexdigest() if key else "", body.user or ""


def timeout_of(headers: Headers, longest: float) -> float:
    """Seconds that the request may take: `x-request-timeout`, at most `longest`. Raises `InvalidRequestError`."""
    given = headers.get("x-request-timeout")
    if given is None:
        return longest
    if not _SECONDS.fullmatch(given) or float(given) == 0:
        raise InvalidRequestError(
            "the header `x-request-timeout` must be a number of seconds above 0", param="x-request-timeout"
        )
    return min(float(given), longest)


def session_of(headers: Headers) -> str | None:
    """The conversation named by `x-session-id`. Raises `InvalidRequestError`."""
    given = headers.get("x-session-id")
    if given is not None and len(given) > MAX_SESSION_CHARS:
        raise InvalidRequestError(
            f"the header `x-session-id` may hold at most {MAX_SESSION_CHARS} characters", param="x-session-id"
        )
    return given or None
