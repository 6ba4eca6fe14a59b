"""ASGI middleware for every request: id, access, size limits, body timeout, unexpected errors.

It reads the whole body, up to a limit, before any handler runs.
"""

import asyncio
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.door.access import Access
from serve_app.api.door.errors import error_response, internal_error, plain_error_response, speaks_anthropic
from serve_app.api.door.limits import ApiLimits
from serve_app.api.door.origins import is_from_browser
from serve_app.api.door.uploads import Uploads
from serve_app.api.request_events import RequestObserver
from serve_app.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    RequestError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_JSON_TYPE = re.compile(r"application/([a-z0-9.\-]+\+)?json")
_WITH_BODY = ("POST", "PUT", "PATCH")
_SMALL_BODY = 64 * 2**10
"""Bodies up to this many bytes are never refused for lack of memory. So large bodies do not block
ordinary requests."""


class _ClientGone(Exception):
    """The client disconnected before its request was complete, so there is no response."""


class RequestGuard:
    """The middleware; see the module's docstring.

    Sets `request_id`, `tenant` and `response_headers` in `scope["state"]`. Handlers fill
    `response_headers`.
    """

    def __init__(self, app: ASGIApp, limits: ApiLimits, observer: RequestObserver, access: Access) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._observer = observer
        self._buffered = 0
        self._uploads = Uploads(limits.max_uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors before the response has started become error responses."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        # Anthropic's clients read the id from this header.
        headers: dict[str, str] = {"request-id": request_id} if speaks_anthropic(scope) else {}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "response_headers": headers}
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update({"x-request-id": request_id, **headers})
            await send(message)

        try:
            await self._serve(scope, receive, send_with_id)
        except _ClientGone:
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # panics of Rust libraries are not `Exception`s
            if not isinstance(error, RequestError):
                logger.exception("request %s failed", request_id)
            if started:
                raise
            # Keep no other reference to the error: it holds this frame, and so the body.
            response = error_response(error if isinstance(error, RequestError) else internal_error(), scope)
            await response(scope, receive, send_with_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.max_header_bytes:
            message = f"the request's headers exceed {self._limits.max_header_bytes} bytes"
            response = plain_error_response(431, message, "headers_too_large", scope)
            await response(scope, receive, send)
            return
        scope["state"]["tenant"] = self._access.tenant_of(scope)
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        self._check_headers(Headers(scope=scope))
        body = bytearray()
        num_bytes = 0
        try:
            try:
                await self._read(scope, receive, body)
            finally:
                num_bytes = len(body)
            replay = _replay(bytes(body), receive)
            body.clear()
            await self._app(scope, replay, send)
        finally:
            self._hold(-num_bytes)

    def _check_headers(self, headers: Headers) -> None:
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedMediaTypeError("compressed bodies are not supported; send plain JSON")
        # A page of another origin may send a body without a type without a preflight request.
        assumed = "" if is_from_browser(headers) else "application/json"
        kind = headers.get("content-type", assumed).partition(";")[0].strip().lower()
        if not _JSON_TYPE.fullmatch(kind):
            raise UnsupportedMediaTypeError("the body must be JSON: set the header Content-Type: application/json")
        length = headers.get("content-length")
        if length is None:
            return
        if not (length.isascii() and length.isdigit()):
            raise InvalidRequestError("the Content-Length header is not a number")
        if int(length) > self._limits.max_body_bytes:
            raise self._too_large()

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        """Read the whole body into `body`, and count it in `_buffered`."""
        seconds = self._limits.body_timeout_s
        reason = f"did not arrive within {seconds:g} seconds"
        try:
            async with asyncio.timeout(seconds) as timer:
                if not await self._read_part(receive, body):
                    return
                with self._uploads.under_way(_source(scope), timer) as upload:
                    try:
                        while await self._read_part(receive, body):
                            pass
                    finally:
                        if upload.displaced:
                            reason = "arrived too slowly while many other bodies were arriving"
        except TimeoutError:
            raise RequestTimeoutError(f"the body {reason}") from None
        except OverloadedError as error:
            self._observer.refused(error.code or "other")
            raise

    async def _read_part(self, receive: Receive, body: bytearray) -> bool:
        """Append the next part to `body`. Returns whether more parts follow."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        part = message.get("body", b"")
        if len(body) + len(part) > self._limits.max_body_bytes:
            raise self._too_large()
        is_large = len(body) + len(part) > _SMALL_BODY
        if is_large and self._buffered + len(part) > self._limits.max_buffered_bytes:
            raise OverloadedError(
                "too many large requests at the same time; retry later", code="bodies_full", retry_after_s=1.0
            )
        body += part
        self._hold(len(part))
        return bool(message.get("more_body", False))

    def _hold(self, num_bytes: int) -> None:
        self._buffered += num_bytes
        self._observer.buffered(self._buffered)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {self._limits.max_body_bytes} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body in one message, then passes on `receive` (a
    disconnect)."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed, body
        if replayed:
            return await receive()
        replayed = True
        whole, body = body, b""  # keep no second reference
        return {"type": "http.request", "body": whole, "more_body": False}

    return replay


def _source(scope: Scope) -> str:
    """Return the client's address. Behind HAProxy, uvicorn takes it from HAProxy's header."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def request_id_of(scope: Scope) -> str:
    """Return the client's request id if it is safe for logs and headers, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
