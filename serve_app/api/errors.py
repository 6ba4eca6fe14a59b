"""The error tree as HTTP responses, in OpenAI's shape. The only place that maps one to the other."""

import math
from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import EngineError, RequestError

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_json(error: RequestError, request_id: str) -> bytes:
    """{"error": {...}} as JSON; the same in a response's body and in a stream's `error` event."""
    return _json(error.message, error.type, error.param, error.code, request_id)


def error_response(error: RequestError, request_id: str) -> Response:
    """The response for `error`, with `Retry-After` (whole seconds) where coming back makes sense.

    A 5xx that is not `retryable` says that it does not: OpenAI's clients would send any other again, and a request that
    kills replicas with it.
    """
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(max(error.retry_after_s or 1.0, 1.0)))
    if error.status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"
    if error.status in (401, 403, 408, 413, 415):
        headers["connection"] = "close"  # what is left of the body is not read
    return _response(error_json(error, request_id), error.status, headers)


def internal_error() -> EngineError:
    """What a client is told of an exception nobody expected: nothing."""
    return EngineError("internal error", code="internal_error")


async def http_exception_handler(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in the same shape."""
    assert isinstance(error, HTTPException)
    body = _json(
        f"{error.detail}: {request.method} {request.url.path[:200]}",
        "invalid_request_error",
        None,
        _HTTP_CODES.get(error.status_code, "http_error"),
        request.state.request_id,
    )
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return _response(body, error.status_code, headers)


def plain_error_response(status: int, message: str, code: str, request_id: str) -> Response:
    """A refusal by the HTTP layer itself that has no place in the error tree."""
    return _response(_json(message, "invalid_request_error", None, code, request_id), status, {})


def _json(message: str, kind: str, param: str | None, code: str | None, request_id: str) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code, "request_id": request_id}
    return orjson.dumps({"error": error})


def _response(body: bytes, status: int, headers: Mapping[str, str]) -> Response:
    return Response(body, status, dict(headers), "application/json")
