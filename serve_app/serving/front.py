"""Middleware before Ray's own handling of an HTTP request, in the ingress and in Ray's proxies.

Ray's handling would be too late for the following:

- One request id: Ray copies the client's id into the response.
- Health checks are answered even if many requests wait in Ray's queue.
- During a flood, requests are started one at a time, so that the event loop's other work continues;
  requests whose clients have left cost almost nothing.
- Ray's own routes are closed.
- Ray's errors get the API's format.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` passes `middlewares` to Ray.
"""

import asyncio
import ipaddress
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.door.access import HEALTH
from serve_app.api.door.errors import error_response
from serve_app.api.door.guard import request_id_of
from serve_app.errors import InvalidRequestError, OverloadedError, RequestError, UnavailableError

_RAYS_ROUTES = "/-/"
_RAYS_HEALTH = b"/-/healthz"
_NO_ROUTE = InvalidRequestError("no such route", code="not_found")
_RAYS_REFUSALS: Mapping[int, tuple[bytes, RequestError]] = {
    404: (b"Ping http://.../-/routes", UnavailableError("no ingress is available now")),
    429: (b"dropped due to backpressure", OverloadedError("too many requests at the same time", code="flood")),
}
"""Ray's plain-text errors by status, and the API errors that replace them.

404: Ray's proxy has no routes for a moment when its controller restarts. 429: its queue is full.
"""


class Front:
    """The middleware that the module's docstring describes."""

    application: ASGIApp | None = None
    """The ingress's application in the ingress's process, which runs on `loop`."""
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the request id and pass the request on. In the ingress, health checks bypass Ray."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        others = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        scope["headers"] = [*others, (b"x-request-id", request_id.encode())]
        own = Front.application if Front.loop is asyncio.get_running_loop() else None
        path = scope["path"]
        if path.startswith(_RAYS_ROUTES):
            await self._answer_for_ray(scope, receive, send, request_id, is_ingress=own is not None)
        elif path in HEALTH:
            await (own or self._app)(scope, receive, send if own is None else _with_id(send, request_id))
        elif (first := await self._begin(receive)) is not None:
            try:
                await self._app(scope, _after(first, receive), _in_shape(scope, send, request_id))
            finally:
                first.cancel()

    async def _begin(self, receive: Receive) -> "asyncio.Task[Message] | None":
        """Start receiving the first message; return the task, or None if the client has left."""
        async with self._turn:
            first = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
        if first.done() and first.result()["type"] == "http.disconnect":
            return None
        return first

    async def _answer_for_ray(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, *, is_ingress: bool
    ) -> None:
        """Pass on Ray's health check from local clients, and in an ingress from any client.

        Refuses Ray's other routes.
        """
        if scope.get("raw_path") == _RAYS_HEALTH and (is_ingress or _is_local(scope)):
            await self._app(scope, receive, send)
        else:
            await _refuse(_NO_ROUTE, 404, scope, send, request_id)


def _is_local(scope: Scope) -> bool:
    host, _ = scope.get("client") or ("", 0)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _after(first: "asyncio.Task[Message]", receive: Receive) -> Receive:
    """Return a `receive` that first returns the message already requested by `first`."""
    taken = False

    async def receive_in_order() -> Message:
        nonlocal taken
        if not taken:
            message = await asyncio.shield(first)
            taken = True
            return message
        return await receive()

    return receive_in_order


async def _refuse(error: RequestError, status: int, scope: Scope, send: Send, request_id: str) -> None:
    response = error_response(error, {**scope, "state": {"request_id": request_id}})
    response.status_code = status
    response.headers["x-request-id"] = request_id
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _in_shape(scope: Scope, send: Send, request_id: str) -> Send:
    """Return a `send` that replaces Ray's plain-text errors with the API's errors."""
    held: list[Message] = []

    async def send_in_shape(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in _RAYS_REFUSALS:
            held.append(message)  # wait for the body, which shows whether Ray sent it
            return
        if held:
            start = held.pop()
            text, error = _RAYS_REFUSALS[start["status"]]
            if text in message.get("body", b""):
                await _refuse(error, error.status, scope, send, request_id)
                return
            await send(start)
        await send(message)

    return send_in_shape


def _with_id(send: Send, request_id: str) -> Send:
    """Return a `send` that adds the request id, for responses that Ray does not add it to."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = request_id
        await send(message)

    return send_with_id


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray puts around each of its HTTP servers."""
    return [Middleware(Front)]
