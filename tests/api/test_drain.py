"""A server that stops: new requests are refused by type, running ones finish, or end with a typed
error in time."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.drain import Drain
from serve_app.errors import UnavailableError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

FAR = 60.0


class Server:
    """One slot in the engine, one entry in the queue."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.service = ScriptedService(tokenizer, hold=asyncio.Event())
        self.admission = AsyncAdmissionQueue(1, 1)
        self.drain = Drain()
        app = create_app(self.service, self.admission, make_limits(), Recorder(), drain=self.drain)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)

    def ask(self, stream: bool) -> asyncio.Task[httpx.Response]:
        body = {"prompt": "x", "stream": stream, "max_tokens": 3}
        return asyncio.create_task(self.http.post("/v1/completions", json=body))

    async def until(self, running: int, queued: int = 0) -> None:
        while (self.service.running, self.admission.queued) != (running, queued):  # noqa: ASYNC110
            await asyncio.sleep(0)

    def finish(self) -> None:
        assert self.service.hold is not None
        self.service.hold.set()


@pytest.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Server]:
    server = Server(tokenizer)
    async with server.http:
        yield server
    assert (server.service.running, server.admission.ongoing, server.admission.queued) == (0, 0, 0)


async def test_an_idle_server_is_drained_at_once(server: Server) -> None:
    await server.drain.run(FAR)


@pytest.mark.parametrize("stream", [False, True])
async def test_running_and_queued_requests_finish_and_new_ones_are_refused(server: Server, stream: bool) -> None:
    running, queued = server.ask(stream), server.ask(stream)
    await server.until(running=1, queued=1)
    drain = asyncio.create_task(server.drain.run(FAR))
    await asyncio.sleep(0)
    for path in ("/health/ready", "/v1/completions"):
        refused = await (server.http.get(path) if "health" in path else server.ask(stream))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "shutting down" in refused.json()["error"]["message"]
    assert (await server.http.get("/health/live")).status_code == 200
    assert not drain.done()
    server.finish()
    for answer in await asyncio.gather(running, queued):
        assert answer.status_code == 200
        assert "[DONE]" in answer.text if stream else answer.json()["usage"]["completion_tokens"] == 3
    await drain


async def test_what_outlasts_the_time_ends_with_a_typed_error(server: Server) -> None:
    """A running stream with an SSE error and no [DONE]; what has sent nothing yet, with a 503."""
    running, queued = server.ask(stream=True), server.ask(stream=True)
    await server.until(running=1, queued=1)
    await server.drain.run(0.0)
    events = [line for line in (await running).text.splitlines() if line]
    assert len(events) > 1
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("server_error", "the server has shut down")
    answer = await queued
    assert answer.status_code == 503
    assert "shut down" in answer.json()["error"]["message"]


async def test_an_answer_that_is_not_streamed_ends_with_503(server: Server) -> None:
    running = server.ask(stream=False)
    await server.until(running=1)
    await server.drain.run(0.0)
    assert (await running).status_code == 503


@asynccontextmanager
async def client_that_does_not_read(server: Server, *headers: tuple[bytes, bytes]) -> AsyncIterator[None]:
    """Its stream has begun, and it takes neither that nor anything after."""
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers,
        "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    body: list[dict[str, Any]] = [{"type": "http.request", "body": b'{"prompt": "x", "stream": true}'}]
    blocked = asyncio.Event()

    async def receive() -> dict[str, Any]:
        return body.pop() if body else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, Any]) -> None:
        blocked.set()
        await asyncio.Event().wait()

    transport = server.http._transport
    assert isinstance(transport, httpx.ASGITransport)
    client = asyncio.create_task(transport.app(scope, receive, send))  # type: ignore[arg-type]
    await blocked.wait()
    yield
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)


async def test_a_client_that_does_not_read_cannot_hold_up_the_end(server: Server) -> None:
    async with client_that_does_not_read(server):
        await server.drain.run(0.0)
        assert server.service.running == 0


async def test_a_client_that_does_not_read_has_its_place_until_its_deadline(server: Server) -> None:
    async with client_that_does_not_read(server, (b"x-request-timeout", b"0.2")):
        assert server.service.running == 1
        await server.until(running=0)


async def test_other_time_limits_inside_keep_their_meaning() -> None:
    drain = Drain()
    with pytest.raises(TimeoutError):
        async with drain.limit(math.inf), asyncio.timeout(0):
            await asyncio.Event().wait()
    await drain.run(0.0)
    async with drain.limit(0.0):
        pass
    drain = Drain()
    with pytest.raises(UnavailableError), drain.request():  # noqa: PT012
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(drain.run(0.0)))
        async with drain.limit(math.inf):
            await asyncio.Event().wait()
