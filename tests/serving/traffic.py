"""Streams against a running server, each compared with what the same request says on its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.serving.conftest import Server

WORKERS = 16


def body(number: int, max_tokens: int = 60) -> dict[str, Any]:
    """Request `number`: every other one samples, some have two choices."""
    return {
        "model": "tiny",
        "prompt": f"Story {number}: " + "long " * (number % 5),
        "max_tokens": max_tokens,
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "n": 1 + (number % 4 == 3),
        "ignore_eos": True,
        "stream": True,
    }


def connect(server: Server) -> httpx.AsyncClient:
    """A client without a limit of connections."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def ask(http: httpx.AsyncClient, request: dict[str, Any]) -> tuple[dict[int, str], list[str]]:
    """The text of each choice, and the events."""
    texts: dict[int, str] = {}
    events = []
    async with http.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            # not a comment, which keeps a quiet stream open, or an error's name
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if line != "data: [DONE]":
                    for choice in json.loads(events[-1]).get("choices", ()):
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, events


@dataclass
class Traffic:
    """Streams without a pause; `wrong` are those that did not end as they do alone."""

    done: int = 0
    wrong: list[Any] = field(default_factory=list)
    workers: int = WORKERS
    """Those beyond this number stop after their present stream."""


@asynccontextmanager
async def traffic(server: Server) -> AsyncIterator[Traffic]:
    """Keep `WORKERS` streams going inside."""
    seen = Traffic()
    async with connect(server) as http:
        expected = [(await ask(http, body(number)))[0] for number in range(WORKERS)]

        async def work(number: int) -> None:
            while number < seen.workers:
                try:
                    texts, events = await ask(http, body(number))
                except (AssertionError, httpx.HTTPError) as error:
                    seen.wrong.append(repr(error))
                    continue
                seen.done += 1
                if (texts, events[-1]) != (expected[number], "[DONE]"):
                    seen.wrong.append((number, texts, events[-2:]))

        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(work(number))
            try:
                yield seen
            finally:
                seen.workers = 0


def replicas(server: Server) -> set[str]:
    """The ids of the engine replicas that are there to stay."""
    listed = httpx.get(f"{server.url}/debug/replicas", timeout=30).json()
    return {replica["id"] for replica in listed if not replica["leaving"]}
