"""Routes of the console: page, files, API documentation, `GET /debug/timeline`, and `rendering`'s.

Decides what a browser may do with these pages: run and fetch only what comes from this server. The
application passes a function that reads recordings.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

import orjson
from fastapi import FastAPI
from pydantic import WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serve_app.console import picture
from serve_app.console.rendering import add_markdown
from serve_app.errors import InvalidRequestError
from serve_app.observability.step_ring import Recording
from serve_app.observability.timeline_trace import chrome_trace

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_FORMATS = ("json", "trace", "html")
_MAX_SECONDS = 86_400.0
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": _MAX_SECONDS}


@dataclass(frozen=True, slots=True)
class Sources:
    """Functions that provide the console's data.

    recordings(seconds): returns each answering replica's `Recording` of its last `seconds` seconds
    as JSON. queue: returns the ingress's requests that wait, and those in engines.
    """

    recordings: Callable[[float], Awaitable[Sequence[bytes]]]
    queue: Callable[[], Mapping[str, int]]


def add_console(app: FastAPI, sources: Sources) -> None:
    """Add the console's routes to the HTTP API."""
    add_markdown(app)
    files = _static_files()
    lock = asyncio.Lock()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _page(*files["index.html"])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return _page(*files["docs.html"])

    @app.get("/console/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _page(*files[name])

    @app.get("/debug/timeline", responses={200: {"content": {_TYPES[".html"]: {}}}})
    async def timeline(
        format: Annotated[str, WithJsonSchema({"enum": [*_FORMATS]})] = "json",
        replica: str | None = None,
        seconds: Annotated[str, WithJsonSchema(_SECONDS)] = "60",
    ) -> Response:
        """Return the engines' last `seconds` seconds: `json`, `trace` (Perfetto) or `html` (a
        picture)."""
        if format not in _FORMATS:
            raise InvalidRequestError(f"`format` must be one of {', '.join(_FORMATS)}", param="format")
        span = _seconds(seconds)
        # Reading involves every replica, so one request at a time.
        async with lock:
            found = await sources.recordings(span)
            if replica is not None:
                found = [recording for recording in found if orjson.loads(recording)["replica"] == replica]
                if not found:
                    raise InvalidRequestError("`replica`: no running replica has this id", param="replica")
            return await asyncio.to_thread(_answer, format, found, sources.queue())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_SECONDS:
        raise InvalidRequestError(f"`seconds` must be a number above 0, at most {_MAX_SECONDS:g}", param="seconds")
    return value


def _answer(kind: str, recordings: Sequence[bytes], queue: Mapping[str, int]) -> Response:
    headers = _HEADERS | {"cache-control": "no-store"}
    if kind == "html":
        headers["content-security-policy"] = picture.CONTENT_SECURITY_POLICY
        return Response(picture.picture(recordings), headers=headers, media_type=_TYPES[".html"])
    if kind == "trace":
        parsed = [Recording.from_json(orjson.loads(recording)) for recording in recordings]
        body = orjson.dumps(chrome_trace(parsed))
    else:
        head = orjson.dumps({"now": time.time(), "queue": dict(queue)})[:-1]
        body = head + b',"replicas":[' + b",".join(recordings) + b"]}"
    return Response(body, headers=headers, media_type="application/json")


def _page(body: bytes, media_type: str) -> Response:
    return Response(body, headers=_HEADERS, media_type=media_type)


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Read all static files. Returns content and type by path."""
    folder = resources.files("serve_app.console")
    suffixes = {path.name: "." + path.name.rpartition(".")[2] for path in folder.iterdir()}
    return {
        name: (folder.joinpath(name).read_bytes(), _TYPES[suffix])
        for name, suffix in suffixes.items()
        if suffix in _TYPES
    }
