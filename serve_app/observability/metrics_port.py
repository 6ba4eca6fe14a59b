"""The metrics port: serves a process's registry and other pages over HTTP in its own threads.

It answers while the process's event loop is busy, and ends with the process, so that no series
outlives its source. Clients can open connections before their key is checked, so connections must
be cheap: one thread reads all requests, few threads answer them, and connections are limited in
time and number.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from prometheus_client import CollectorRegistry, make_wsgi_app

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Page = Callable[[Mapping[str, str]], bytes]
"""Returns JSON from the query's parameters. Called in a worker thread."""

Admits = Callable[[str], bool]
"""Whether a client with this key may see the pages. Called in any thread."""

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
"""One more closes the oldest connection that has not sent its request yet."""
_MAX_HEAD_BYTES = 16_384
_TIME_LIMIT_S = 5.0
"""Time limit for a request to arrive, and for its answer to be read."""
_WORKERS = 2


def serve_registry(
    registry: CollectorRegistry, host: str, pages: Mapping[str, Page] | None = None, admits: Admits | None = None
) -> int:
    """Serve `registry`, and `pages` by path, on a free port of `host`. Returns the port.

    Only for clients whose key `admits` accepts; for all if it is None. Raises `OSError` if it
    cannot listen.
    """
    app = _with_pages(pages or {}, make_wsgi_app(registry))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=_MAX_CONNECTIONS)
    port = int(listening.getsockname()[1])
    server = _Server(app if admits is None else _behind_key(admits, app))
    threading.Thread(target=lambda: asyncio.run(server.run(listening)), name="metrics", daemon=True).start()
    return port


class _Server:
    """HTTP/1.1 server for one GET per connection."""

    def __init__(self, app: "WSGIApplication") -> None:
        self._app = app
        self._workers = ThreadPoolExecutor(_WORKERS, "metrics")
        self._reading: dict[asyncio.StreamWriter, None] = {}
        """Connections whose requests have not arrived, oldest first."""
        self._answering = 0

    async def run(self, listening: socket.socket) -> None:
        """Serve forever."""
        server = await asyncio.start_server(self._serve, sock=listening, limit=_MAX_HEAD_BYTES)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reading[writer] = None
        while self._reading and len(self._reading) + self._answering > _MAX_CONNECTIONS:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_TIME_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if writer not in self._reading:
                return
            del self._reading[writer]
            await self._respond(head, writer)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            self._reading.pop(writer, None)
            writer.transport.abort()

    async def _respond(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        self._answering += 1
        try:
            writer.write(await asyncio.get_running_loop().run_in_executor(self._workers, self._answer, head))
            async with asyncio.timeout(_TIME_LIMIT_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        finally:
            self._answering -= 1

    def _answer(self, head: bytes) -> bytes:
        """Return the response to the request with this head. Runs in a worker thread."""
        status, headers, body = "400 Bad Request", [("Content-Type", "text/plain")], b"this is not a valid request\n"

        def start_response(line: str, fields: list[tuple[str, str]], _error: Any = None) -> Callable[[bytes], object]:
            nonlocal status, headers
            status, headers = line, fields
            return lambda _: None

        environ = _environ(head)
        if environ is not None:
            try:
                body = b"".join(self._app(environ, start_response))
            except Exception:  # any error of a page must not affect later requests
                logger.exception("the page %s failed", environ["PATH_INFO"])
                failed = HTTPStatus.INTERNAL_SERVER_ERROR
                status, headers, body = f"{failed.value} {failed.phrase}", [], b""
            if environ["REQUEST_METHOD"] == "HEAD":
                body = b""
        sent = [*((k, v) for k, v in headers if k.lower() != "content-length"), ("Content-Length", str(len(body)))]
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in sent), "Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _environ(head: bytes) -> dict[str, Any] | None:
    """Return the WSGI variables that the pages use; None for an invalid request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    with suppress(ValueError):
        method, target, _version = first.split(" ")
        url = urlsplit(target)
        environ: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": unquote(url.path), "QUERY_STRING": url.query}
        for line in filter(None, lines):
            name, value = line.split(":", 1)
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value.strip()
        return environ
    return None


def _with_pages(pages: Mapping[str, Page], otherwise: "WSGIApplication") -> "WSGIApplication":
    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            return otherwise(environ, start_response)
        body = page(dict(parse_qsl(environ["QUERY_STRING"])))
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return answer


def _behind_key(admits: Admits, app: "WSGIApplication") -> "WSGIApplication":
    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        scheme, _, key = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() == "bearer" and admits(key.strip()):
            return app(environ, start_response)
        body = b"this needs an admin's API key: send the header `Authorization: Bearer <key>`\n"
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("WWW-Authenticate", "Bearer")]
        start_response("401 Unauthorized", headers)
        return [body]

    return answer
