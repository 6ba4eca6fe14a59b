"""What comes before Ray's own handling of an HTTP request, in the ingress and in Ray's proxies.

Decides what is too late behind it: the request's id, which Ray writes into the response as the client sent it; that
health checks are answered however many requests wait in Ray's queue; that a flood of requests is begun one at a time,
so that whatever else the event loop has to do goes on, and those whose clients have left cost next to nothing; that
Ray's routes are closed; and that Ray's refusals have the API's shape.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares` to Ray.
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
_NO_ROUTE = InvalidRequestError("there is no such route", code="not_found")
_RAYS_REFUSALS: Mapping[int, tuple[bytes, RequestError]] = {
    404: (b"Ping http://.../-/routes", UnavailableError("no ingress can take this request now")),
    429: (b"dropped due to backpressure", OverloadedError("too many requests at one time", code="flood")),
}
"""What Ray says in plain text, and what it means: its proxy has no routes for a moment when its controller comes back;
its queue is full."""


class Front:
    """See the module's docstring."""

    application: ASGIApp | None = None
    """The ingress's own, in its process; it runs on `loop`."""
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request one id, and pass it on, health past Ray where this is the ingress's process."""
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
        """The request's first message, which may be to come; None if the client has left."""
        async with self._turn:
            first = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
        if first.done() and first.result()["type"] == "http.disconnect":
            return None
        return first

    async def _answer_for_ray(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, *, is_ingress: bool
    ) -> None:
        """Ray's health, for this machine, and in an ingress for HAProxy on any; nothing else of Ray's."""
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
    """`receive`, with the message first that it has been asked for already."""
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
    """`send` that puts the API's own error in the place of what Ray says in plain text."""
    held: list[Message] = []

    async def send_in_shape(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in _RAYS_REFUSALS:
            held.append(message)  # until its body says whose it is
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
    """Where Ray does not write the id into the response."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = request_id
        await send(message)

    return send_with_id


def middlewares() -> list[Middleware]:
    """What Ray is to put around every HTTP server of its own."""
    return [Middleware(Front)]
