"""Converts errors to HTTP responses, in OpenAI's or Anthropic's format by route.

No other module does this.
"""

import math
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from serve_app.api.door.access import path_of
from serve_app.errors import EngineError, RequestError

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_ANTHROPIC = "/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the request's route belongs to Anthropic's API."""
    return is_anthropic(path_of(scope))


def is_anthropic(path: str) -> bool:
    """Whether this path belongs to Anthropic's API."""
    path = path.removeprefix("/v1")
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def error_json(error: RequestError, request_id: str) -> bytes:
    """Return {"error": {...}} as JSON, for a response's body or a stream's `error` event."""
    return _json(error.message, error.type, error.param, error.code, request_id)


def anthropic_error_json(error: RequestError, request_id: str) -> bytes:
    """Return the error as JSON in Anthropic's format."""
    return _anthropic_json(error.status, error.message, request_id)


def error_response(error: RequestError, scope: Scope) -> Response:
    """Return the response for `error`. 429 and 503 get `Retry-After`, in whole seconds.

    A 5xx that is not `retryable` gets `x-should-retry: false`. OpenAI's clients retry any other
    5xx, even for a request that crashes replicas.
    """
    to_json = anthropic_error_json if speaks_anthropic(scope) else error_json
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(max(error.retry_after_s or 1.0, 1.0)))
    if error.status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"
    if error.status in (401, 403, 408, 413, 415):
        headers["connection"] = "close"  # the rest of the body is not read
    return _response(to_json(error, scope["state"]["request_id"]), error.status, headers)


def internal_error() -> EngineError:
    """Return the client's error for an unexpected exception. It has no details."""
    return EngineError("internal error", code="internal_error")


async def http_exception_handler(request: Request, error: Exception) -> Response:
    """Convert Starlette's own errors (unknown route, wrong method) to the API's format."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    code = _HTTP_CODES.get(error.status_code, "http_error")
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return plain_error_response(error.status_code, message, code, request.scope, headers)


def plain_error_response(
    status: int, message: str, code: str, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response of the HTTP layer that has no class in `serve_app.errors`."""
    request_id = scope["state"]["request_id"]
    if speaks_anthropic(scope):
        return _response(_anthropic_json(status, message, request_id), status, headers or {})
    return _response(_json(message, "invalid_request_error", None, code, request_id), status, headers or {})


def _json(message: str, kind: str, param: str | None, code: str | None, request_id: str) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code, "request_id": request_id}
    return orjson.dumps({"error": error})


def _anthropic_json(status: int, message: str, request_id: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


def _response(body: bytes, status: int, headers: Mapping[str, str]) -> Response:
    return Response(body, status, dict(headers), "application/json")
