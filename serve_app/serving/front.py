"""What stands before Ray's own handling of an HTTP request, in the ingress and in Ray's proxies.

Decides two things that are too late behind it: the request's id, which Ray writes into the response as the client sent
it, and that health checks are answered however many requests wait in Ray's queue.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares` to Ray.
"""

import asyncio

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.access import HEALTH
from serve_app.api.guard import request_id_of


class Front:
    """See the module's docstring."""

    application: ASGIApp | None = None
    """The ingress's own, in its process; it runs on `loop`."""
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request one id, and pass it on, health past Ray where this is the ingress's process."""
        if scope["type"] == "http":
            request_id = request_id_of(scope)
            others = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            scope["headers"] = [*others, (b"x-request-id", request_id.encode())]
            own = Front.application
            if own is not None and scope["path"] in HEALTH and Front.loop is asyncio.get_running_loop():
                await own(scope, receive, _with_id(send, request_id))
                return
        await self._app(scope, receive, send)


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
