"""The HTTP API over a scripted service (fast, exact) and over a real engine behind a real HTTP
server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.limits import ApiLimits
from serve_app.api.request_events import Endpoint, Outcome
from serve_app.core.step_record import StepRecord
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.api.limits import make_limits
from tests.api.services import EngineService, ScriptedService
from tests.engine.streams import StreamEngine
from tests.text.formats import tokenizer_of


@dataclass
class Recorder:
    """A `RequestObserver` that remembers."""

    ended: list[tuple[Endpoint, Outcome, int, int]] = field(default_factory=list)
    charges: list[tuple[str, Outcome, int, int, int]] = field(default_factory=list)
    begun: int = 0
    first_tokens: int = 0
    num_tokens: int = 0
    gaps: list[float | None] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    grammars: list[float | str] = field(default_factory=list)
    body_bytes: list[int] = field(default_factory=list)

    def started(self, endpoint: Endpoint) -> None:
        self.begun += 1

    def queued(self, seconds: float) -> None:
        self.waits.append(seconds)

    def buffered(self, num_bytes: int) -> None:
        self.body_bytes.append(num_bytes)

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def grammar_built(self, seconds: float) -> None:
        self.grammars.append(seconds)

    def grammar_refused(self, reason: str) -> None:
        self.grammars.append(reason)

    def first_token(self, seconds: float) -> None:
        self.first_tokens += 1

    def tokens(self, count: int, gap: float | None) -> None:
        self.num_tokens += count
        self.gaps.append(gap)

    def charged(self, key: str, outcome: Outcome, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        self.charges.append((key, outcome, prompt_tokens, cached_tokens, output_tokens))

    def finished(
        self, endpoint: Endpoint, outcome: Outcome, prompt_tokens: int, output_tokens: int, seconds: float
    ) -> None:
        self.ended.append((endpoint, outcome, prompt_tokens, output_tokens))


@dataclass
class Api:
    """An application under test, its parts, and clients that call it in this process."""

    service: Any
    admission: AsyncAdmissionQueue
    observer: Recorder
    app: Any
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI


def build_api(service: Any, admission: AsyncAdmissionQueue, limits: ApiLimits | None = None) -> Api:
    observer = Recorder()
    app = create_app(service, admission, limits or make_limits(), observer)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30)
    client = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)
    return Api(service, admission, observer, app, http, client)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("default")


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """Over a scripted service; small limits, so that tests can reach them."""
    built = build_api(
        ScriptedService(tokenizer),
        AsyncAdmissionQueue(4, 2),
        make_limits(max_body_bytes=1_000_000, max_buffered_bytes=2_000_000, body_timeout_s=0.2),
    )
    async with built.http:
        yield built
    assert built.service.running == 0
    assert (built.admission.ongoing, built.admission.queued) == (0, 0)


@pytest.fixture
async def scripted() -> AsyncIterator[Api]:
    """Answers what the test writes into `service.reply`."""
    built = build_api(ScriptedService(tokenizer_of("hermes")), AsyncAdmissionQueue(4, 2))
    async with built.http:
        yield built
    assert built.service.running == 0
    assert (built.admission.ongoing, built.admission.queued) == (0, 0)


def script(api: Api, reply: str, tokenizer: Tokenizer | None = None) -> None:
    """What `scripted` answers next, and by which tokenizer."""
    api.service.reply = reply
    if tokenizer is not None:
        api.service.tokenizer = tokenizer


def prompt(api: Api) -> str:
    """The last request's, as text."""
    text: str = api.service.tokenizer.decode(api.service.requests[-1].prompt_token_ids)
    return text


@pytest.fixture(scope="session")
def babbler() -> PagedModel:
    """`babbler_module` as the engine runs it."""
    return from_module(babbler_module(), max_model_len=512)


def babbler_module() -> LlamaForCausalLM:
    """Random weights over the default tokenizer's vocabulary: answers full of half characters, a
    step takes ms."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@asynccontextmanager
async def running(model: PagedModel, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """Over a real engine and a real HTTP server on a loopback port. Afterwards the engine must be
    empty."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, kv_cache_gib=0.05)
    records: list[StepRecord] = []
    engine = await StreamEngine.start_with(
        lambda: EngineCore(model, config, on_step=records.append, vocabulary=tokenizer.vocabulary)
    )
    built = build_api(EngineService(engine, tokenizer, records), AsyncAdmissionQueue(8, 4))
    server = uvicorn.Server(uvicorn.Config(built.app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    await built.http.aclose()
    built.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
    built.openai = openai.AsyncOpenAI(
        api_key="none", base_url=f"http://127.0.0.1:{port}/v1", http_client=built.http, max_retries=0
    )
    try:
        yield built
    finally:
        await built.http.aclose()
        server.should_exit = True
        await serving
    await idle(built)
    await engine.shutdown()


@pytest.fixture
async def live(babbler: PagedModel, tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """A running server whose model says random tokens."""
    async with running(babbler, tokenizer) as built:
        yield built


async def idle(api: Api) -> None:
    """Wait until the engine has let go of everything; the test's time limit ends a leak."""
    while True:
        stats = api.service.engine.stats()
        if stats.waiting == stats.running == stats.blocks_used == api.admission.ongoing == api.admission.queued == 0:
            return
        await asyncio.sleep(0.005)
