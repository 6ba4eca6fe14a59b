"""`POST /markdown`: converts an answer's Markdown to HTML for the console.

Parsers and highlighters take seconds for some inputs, and hold the GIL meanwhile. That would block
the ingress and all streams. So `markdown` runs in its own process. It ends when a text takes too
long, and when this process ends, since its input then closes.
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
    """A process that renders one text at a time.

    Started with the first text, and again after it has ended.
    """

    def __init__(self, cpu_limit_s: float = _CPU_LIMIT_S) -> None:
        """cpu_limit_s: CPU time per text, which does not depend on the machine's load."""
        self._cpu_limit_s = cpu_limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="markdown")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0

    async def blocks(self, text: str) -> bytes:
        """Return `markdown.blocks` of a text as JSON.

        Raises `OverloadedError` and `InvalidRequestError`.
        """
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
            raise InvalidRequestError(
                f"`text` could not be rendered within {self._cpu_limit_s:g} seconds", param="text"
            )
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # Run by path, so that no part of the package is imported.
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
