"""Compatibility with clients, probes and load tools of other servers.

Adds their routes, paths without `/v1`, HEAD, and paths with a trailing slash.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.endpoint import ApiContext

_PREFIX = "/v1"


def add_peer_routes(app: FastAPI, context: ApiContext, ready: Callable[..., Any]) -> None:
    """Add the routes of other servers to `app`. `ready` is the handler of the readiness routes."""
    for path in ("/health", "/ping"):
        app.add_api_route(path, ready, include_in_schema=False)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of sequences that wait in this ingress's queue or are being
        generated."""
        return {"server_load": context.admission.queued + context.admission.ongoing}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return the tokenizer's special tokens, size and chat template."""
        tokenizer = context.service.tokenizer
        return {**tokenizer.info(), "max_model_len": context.service.model.max_model_len}

    for route in [*app.routes]:
        if isinstance(route, APIRoute) and route.path.startswith(f"{_PREFIX}/"):
            path = route.path.removeprefix(_PREFIX)
            app.add_api_route(path, route.endpoint, methods=[*(route.methods or ())], include_in_schema=False)


class SlashAtEnd:
    """Serves a path with a trailing slash as the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Remove the slash and call the application."""
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as GET without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with GET, and send its headers without the body."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_headers)
