"""Every generation request leaves one summary, however it ends, and nothing of its text."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.request_events import Outcome, RequestSummary
from serve_app.errors import EngineError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

PROMPT = "a secret that no log may hold"


@dataclass
class Logged:
    http: httpx.AsyncClient
    service: ScriptedService
    queue: AsyncAdmissionQueue
    lines: list[RequestSummary] = field(default_factory=list)

    async def ask(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": PROMPT, **body}, headers=headers)

    def line(self) -> RequestSummary:
        assert len(self.lines) == 1
        return self.lines.pop()


@pytest.fixture
async def logged(tokenizer: Tokenizer) -> AsyncIterator[Logged]:
    lines: list[RequestSummary] = []
    service, queue = ScriptedService(tokenizer), AsyncAdmissionQueue(2, 1)
    app = create_app(service, queue, make_limits(), Recorder(), log=lines.append)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield Logged(http, service, queue, lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completed_request(logged: Logged, stream: bool) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    answer = await logged.ask(headers, max_tokens=4, stream=stream)
    assert answer.headers["x-request-id"] == "mine-1"
    line = logged.line()
    assert (line.request_id, line.endpoint, line.outcome, line.error) == ("mine-1", "completions", "completed", None)
    assert (line.output_tokens, line.traceparent) == (4, headers["traceparent"])
    assert line.prompt_tokens == len(logged.service.requests[0].prompt_token_ids)
    assert line.engine_ids == (logged.service.requests[0].request_id,)
    assert line.queue_s is not None
    assert line.first_token_s is not None
    assert 0 <= line.queue_s <= line.first_token_s <= line.seconds
    assert PROMPT not in str(asdict(line))


async def test_the_replicas_that_the_service_names(logged: Logged) -> None:
    generate = logged.service.generate

    def named(request: Any, context: Any) -> Any:
        context.replicas.extend(["alpha", "beta", "alpha"])
        return generate(request, context)

    logged.service.generate = named  # type: ignore[method-assign]
    await logged.ask(max_tokens=1)
    assert logged.line().replicas == ("alpha", "beta")


async def test_a_request_that_is_refused(logged: Logged) -> None:
    assert (await logged.ask(temperature=9)).status_code == 400
    line = logged.line()
    assert (line.outcome, line.error) == (Outcome.INVALID, "invalid_request_error")
    assert (line.queue_s, line.first_token_s, line.output_tokens, line.engine_ids) == (None, None, 0, ())


@pytest.mark.parametrize(
    ("error", "name"),
    [(EngineError("broken", code="engine_died"), "engine_died"), (RuntimeError("a secret path"), "internal_error")],
)
async def test_a_request_that_fails_in_its_stream(logged: Logged, error: Exception, name: str) -> None:
    logged.service.error, logged.service.error_at = error, 2
    answer = await logged.ask(max_tokens=8, stream=True)
    assert answer.status_code == 200
    line = logged.line()
    assert (line.outcome, line.error, line.output_tokens) == (Outcome.FAILED, name, 2)


async def test_a_client_that_leaves(logged: Logged) -> None:
    logged.service.hold = asyncio.Event()
    asking = asyncio.create_task(logged.ask(max_tokens=8))
    while not logged.service.running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    line = logged.line()
    assert (line.outcome, line.error) == (Outcome.CANCELLED, None)
