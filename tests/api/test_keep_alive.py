"""Streams in which nothing comes for long: they show life, and clients read what they would have
read without."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api import sse
from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.errors import EngineError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, build_api
from tests.api.sdks import anthropic_of, strict_openai
from tests.api.services import ScriptedService

TEXT = "Paris is the capital of France."
MESSAGES: list[Any] = [{"role": "user", "content": "Capital of France?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "France"},
    "/v1/responses": {"input": "Capital of France?"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
}


class Pinged:
    """An application whose service goes on once a stream has shown life; keeps what the last stream
    said."""

    def __init__(self, app: ASGIApp, service: ScriptedService) -> None:
        self._app = app
        self._service = service
        self.streamed = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streamed = b""

        async def watched(message: Message) -> None:
            await send(message)
            self.streamed += message.get("body", b"")
            if b"ping" in self.streamed:
                assert self._service.hold is not None
                self._service.hold.set()

        await self._app(scope, receive, watched)


@pytest.fixture
async def quiet(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """One request at a time, which rests after its first token."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    service = ScriptedService(tokenizer, hold=asyncio.Event())
    built = build_api(service, AsyncAdmissionQueue(1, 1))
    built.app = Pinged(built.app, service)
    await built.http.aclose()
    built.http = httpx.AsyncClient(transport=httpx.ASGITransport(built.app), base_url="http://test", timeout=30)
    async with built.http:
        yield built
    assert (service.running, built.admission.ongoing) == (0, 0)


async def begun(api: Api) -> None:
    while not api.service.running:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_clients_of_openai_skip_it(quiet: Api) -> None:
    client = strict_openai(quiet.http)
    chat = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in chat]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert b"}\n\n: ping\n\ndata: {" in quiet.app.streamed
    quiet.service.hold.clear()
    async with client.responses.stream(model="scripted", input="Capital of France?") as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_response()).output_text == TEXT
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert b": ping\n\n" in quiet.app.streamed


async def test_clients_of_anthropic_skip_it(quiet: Api) -> None:
    async with (
        anthropic_of(quiet.app) as client,
        client.messages.stream(model="scripted", messages=MESSAGES, max_tokens=50) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == TEXT
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in quiet.app.streamed


@pytest.mark.parametrize("path", BODIES)
async def test_who_waits_in_the_queue_hears_of_it(quiet: Api, path: str) -> None:
    first = asyncio.create_task(quiet.http.post("/v1/completions", json={"prompt": "x"}))
    await begun(quiet)
    answer = await quiet.http.post(path, json={**BODIES[path], "stream": True})
    assert answer.text.startswith(": ping\n\n")
    assert answer.text.count("Paris") >= 1
    assert (await first).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_it_is_told_in_the_stream(quiet: Api, path: str) -> None:
    """The status is gone by then; what it would have been told with stays the same."""
    first = asyncio.create_task(quiet.http.post("/v1/completions", json={"prompt": "x"}))
    await begun(quiet)
    quiet.service.error, quiet.service.error_at = EngineError("the engine failed"), 0
    answer = await quiet.http.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    comment, *events = answer.text.removesuffix("\n\n").split("\n\n")
    names = [event.partition("\n")[0] for event in events if not event.startswith(":")]
    told = ["event: error"]
    if path == "/v1/responses":
        told = ["response.created", "response.in_progress", "error", "response.failed"]
        told = [f"event: {name}" for name in told]
    assert (comment, names) == (": ping", told)
    assert "the engine failed" in answer.text
    await first
