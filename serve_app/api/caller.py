"""What a request's headers say beside its body: whose it is, how long it may take, which conversation it belongs to."""

import re

from starlette.datastructures import Headers

from serve_app.api.admission import Caller
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.errors import InvalidRequestError, PermissionDeniedError
from serve_app.tenants.tenant import Tenant

MAX_SESSION_CHARS = 256

_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?", re.ASCII)


def caller_of(tenant: Tenant, body: GenerationBody, deadline: float) -> Caller:
    """Among whom the queue is fair: tenants, and within each its users. Raises `PermissionDeniedError`.

    Users are shares of their tenant's share, so naming many gains nothing. Who has no key that the server knows, and
    names no user, shares one line: a string that anybody can invent, or an address, would name nobody.
    """
    priority = body.priority or 0
    lowest, highest = tenant.priority
    if tenant.name and not lowest <= priority <= highest:
        raise PermissionDeniedError(
            f"this API key may ask for a `priority` from {lowest} to {highest}, got {priority}", param="priority"
        )
    return Caller((tenant.name, body.user or ""), priority, deadline, tenant.weight)


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
