"""A small real HTTP server that answers completions with the events that a test decides."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from serve_app.workloads.client import Server
from serve_app.workloads.mixes import WorkItem
from serve_app.workloads.prompts import PromptWriter

ITEM = WorkItem("one two three", 3, 4)
DONE = {"choices": [{"text": "", "finish_reason": "length"}]}


class WordTokenizer:
    """One token per word."""

    vocab_size = 1000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        number = token_ids[0]
        return "w" + "".join(chr(97 + number // 26**power % 26) for power in range(3))


WRITER = PromptWriter(WordTokenizer())


class FakeServer:
    """Answers completions with the events that `script(body)` gives, and remembers what it was
    asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.script: Callable[[dict[str, Any]], list[Any]] = answer
        self.arrivals = asyncio.Semaphore(0)
        self.hold: asyncio.Event | None = None
        self.headers: dict[str, str] = {}
        """Of answers that are no stream."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.arrivals.release()
        events = self.script(body)
        if isinstance(events[0], int):
            self.at_once -= 1
            return web.json_response({"error": {"message": "no"}}, status=events[0], headers=self.headers)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            if self.hold is not None:
                await self.hold.wait()
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self.at_once -= 1
        return response


def token(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None}]}


def answer(body: dict[str, Any]) -> list[Any]:
    count = body["max_tokens"]
    usage = {"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": len(body["prompt"].split())}}
    return [*(token("word ") for _ in range(count)), DONE, usage, "[DONE]"]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[FakeServer, Server]]:
    """The fake server on loopback, and how a client sees it."""
    server = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    app.router.add_get("/v1/models", models)
    async with TestServer(app) as running:
        yield server, Server(str(running.make_url("/")), "tiny", timeout_s=10)
