"""Reads tenant, user, priority, timeout and session from a request."""

import re

from starlette.datastructures import Headers

from serve_app.api.admission import Caller
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.errors import InvalidRequestError, PermissionDeniedError
from serve_app.tenants.tenant import Tenant

MAX_SESSION_CHARS = 256

_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?", re.ASCII)


def caller_of(tenant: Tenant, body: GenerationBody, deadline: float) -> Caller:
    """Return the request's `Caller` for the admission queue.

    Users divide their tenant's share, so inventing users gains nothing. Requests without a known
    key and without a user share one queue, since neither a made-up name nor an address identifies a
    client. Raises `PermissionDeniedError` for a priority that the key does not allow.
    """
    priority = body.priority or 0
    lowest, highest = tenant.priority
    if tenant.name and not lowest <= priority <= highest:
        raise PermissionDeniedError(
            f"this API key allows a `priority` from {lowest} to {highest}, got {priority}", param="priority"
        )
    return Caller((tenant.name, body.user or ""), priority, deadline, tenant.weight)


def timeout_of(headers: Headers, longest: float) -> float:
    """Return the timeout in seconds: `x-request-timeout`, at most `longest`.

    Raises `InvalidRequestError`.
    """
    given = headers.get("x-request-timeout")
    if given is None:
        return longest
    if not _SECONDS.fullmatch(given) or float(given) == 0:
        raise InvalidRequestError(
            "the header `x-request-timeout` must be a number of seconds above 0", param="x-request-timeout"
        )
    return min(float(given), longest)


def session_of(headers: Headers) -> str | None:
    """Return the session id from `x-session-id`. Raises `InvalidRequestError`."""
    given = headers.get("x-session-id")
    if given is not None and len(given) > MAX_SESSION_CHARS:
        raise InvalidRequestError(
            f"the header `x-session-id` may have at most {MAX_SESSION_CHARS} characters", param="x-session-id"
        )
    return given or None
