"""`POST /markdown`: the HTML of an answer's Markdown, for the console's page.

Parsers and highlighters have inputs for which they take seconds, with Python's lock held; the ingress, through which
all streams go, must not wait for them. So `markdown` runs in a process of its own, which ends when a text takes it too
long, and with this one: its input then does.
"""

import asyncio
import json
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from serve_app.api.bodies.body import Body
from serve_app.api.bodies.schemas import parse_body
from serve_app.errors import InvalidRequestError, OverloadedError

MAX_CHARS = 100_000
_MAX_WAITING = 16
_CPU_LIMIT_S = 3.0


class MarkdownBody(Body):
    """POST /markdown."""

    text: Annotated[str, Field(max_length=MAX_CHARS)]


def add_markdown(app: FastAPI) -> None:
    """Add the route to the HTTP API."""
    renderer = Renderer()

    @app.post("/markdown", include_in_schema=False)
    async def markdown(request: Request) -> Response:
        body = parse_body(MarkdownBody, await request.body())
        return Response(await renderer.blocks(body.text), media_type="application/json")


class Renderer:
    """One process that renders one text at a time; it starts with the first text, and again after it has ended."""

    def __init__(self, cpu_limit_s: float = _CPU_LIMIT_S) -> None:
        """`cpu_limit_s`: what a text may take of the processor's time, which a busy machine does not change."""
        self._cpu_limit_s = cpu_limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="markdown")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0

    async def blocks(self, text: str) -> bytes:
        """JSON: `markdown.blocks` of a text. Raises `OverloadedError` and `InvalidRequestError`."""
        if self._waiting == _MAX_WAITING:
            raise OverloadedError("too many texts are waiting to be rendered", retry_after_s=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, text)
        finally:
            self._waiting -= 1

    def _ask(self, text: str) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(text).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self._process = None
            _end(process)
            raise InvalidRequestError(f"`text` is not rendered within {self._cpu_limit_s:g} seconds", param="text")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # By its path: no part of the package has to be imported there.
        program = str(resources.files("serve_app.console").joinpath("markdown.py"))
        command = [sys.executable, "-I", program, str(self._cpu_limit_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
