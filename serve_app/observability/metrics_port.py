"""The metrics port: a process's registry, and other pages beside it, over HTTP in threads of their own.

It answers while the event loop is busy, and dies with the process, so that no series outlives its source.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, start_http_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Page = Callable[[Mapping[str, str]], bytes]
"""Makes JSON from the parameters of a query. Called in a thread of its own."""

Admits = Callable[[str], bool]
"""Whether who sends this key may see the pages. Called in any thread."""


def serve_registry(
    registry: CollectorRegistry, host: str, pages: Mapping[str, Page] | None = None, admits: Admits | None = None
) -> int:
    """Serve `registry`, and `pages` by their paths, on a free port of `host`; returns the port.

    To whom `admits` says so, by the key that the request brings; to everybody without it.
    """
    server, _thread = start_http_server(0, addr=host, registry=registry)
    app = _with_pages(pages or {}, server.get_app())  # type: ignore[arg-type]
    server.set_app(app if admits is None else _behind_key(admits, app))
    return int(server.server_port)


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
