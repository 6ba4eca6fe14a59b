"""The console over two engines in this process, behind a real HTTP server; and a headless Chromium
that looks at it.

Without a Chromium on the machine (Debian: `apt-get install chromium`) the browser's tests are
skipped and say so.
"""

import asyncio
import itertools
import re
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.api.service import NO_CONTEXT, MetricsPage, ModelCard, RequestContext
from serve_app.console.routes import Sources, add_console
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, TokenDelta
from serve_app.core.step_record import StepRecord
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import UnavailableError
from serve_app.model.loader import from_module
from serve_app.observability.step_ring import Recorder, StepRing
from serve_app.tenants.keys import KeyRing, hash_key
from serve_app.tenants.tenant import Tenant
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder as RequestRecorder
from tests.api.limits import make_limits
from tests.engine.streams import StreamEngine
from tests.text.formats import tokenizer_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

SLOTS = 4
REPLICAS = ("alpha", "beta")
EOS = 2
KEYS = {"team-key": Tenant(name="team"), "admin-key": Tenant(name="boss", admin=True)}


class Pace:
    """How long a step takes at least, so that a page which looks once a second sees one on any
    machine."""

    step_s = 0.0


def small_engine(pace: Pace, vocab_size: int) -> tuple[EngineCore, StepRing]:
    """Random weights: answers are nonsense, a step takes a millisecond."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.5,
    )
    ring = StepRing()

    def on_step(record: StepRecord) -> None:
        ring.append(record)
        time.sleep(pace.step_s)

    options = EngineConfig(max_num_seqs=SLOTS, max_num_batched_tokens=32, kv_cache_gib=0.05)
    return EngineCore(from_module(LlamaForCausalLM(config).eval()), options, on_step=on_step), ring


@dataclass
class Engines:
    """`api.Service` over engines in this process, taken in turn.

    `override` stands in for what they would say, over and over, or `answer`, once; replicas in
    `silent` tell nothing of themselves.
    """

    engines: Sequence[StreamEngine]
    tokenizer: Tokenizer
    override: list[str] = field(default_factory=list)
    answer: str = ""
    requests: list[EngineRequest] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.engines)

    @property
    def model(self) -> ModelCard:
        info = self.engines[0].info
        made = 1_700_000_000, "fp_console"
        return ModelCard(
            "babbler", info.max_model_len, info.vocab_size, *made, info.hidden_size, info.pooling, info.eos_token_ids
        )

    def check_cluster(self) -> None:
        """Nothing is lost."""

    def check_ready(self) -> None:
        if self.silent >= set(REPLICAS):
            raise UnavailableError("no replica is ready")

    async def metrics(self) -> MetricsPage:
        return MetricsPage(b"", "text/plain")

    async def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        self.requests.append(request)
        ids = self.tokenizer.encode(self.answer or "".join(self.override), add_special_tokens=False)
        if self.answer:
            # A grammar would make the engine say something else, at another length.
            ids.append(EOS)
            params = replace(request.params, grammar=None, thinking_budget=None, max_tokens=len(ids), ignore_eos=True)
            request = replace(request, params=params)
        async for deltas in next(self._turns).generate(request):
            yield [self._instead(delta, ids) if ids else delta for delta in deltas]

    def _instead(self, delta: TokenDelta, ids: list[int]) -> TokenDelta:
        said = tuple(ids[(delta.offset + i) % len(ids)] for i in range(len(delta.token_ids)))
        reason = FinishReason.STOP if delta.finish_reason and self.answer else delta.finish_reason
        return TokenDelta(delta.request_id, delta.choice, delta.offset, said, finish_reason=reason)


@dataclass
class ConsoleServer:
    """The server in a thread of its own, with its event loop."""

    url: str
    service: Engines
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def busy(self) -> int:
        return sum(engine.stats().running + engine.stats().waiting for engine in self.service.engines)


async def serve(started: "threading.Event", box: dict[str, Any], access: Access | None = None) -> None:
    pace, tokenizer = Pace(), tokenizer_of("qwen3")
    cores = [small_engine(pace, tokenizer.vocab_size) for _ in REPLICAS]
    engines = [await StreamEngine.start_with(lambda core=core: core) for core, _ in cores]  # type: ignore[misc]
    recorders = [
        Recorder(
            name,
            SLOTS,
            engine.info.block_size,
            engine.stats,
            lambda engine=engine: engine.health().last_step_age_s,  # type: ignore[misc]
            ring,
        )
        for name, engine, (_, ring) in zip(REPLICAS, engines, cores, strict=True)
    ]
    service, queue = Engines(engines, tokenizer, pace=pace), AsyncAdmissionQueue(16, 8)
    app = create_app(service, queue, make_limits(), RequestRecorder(), access=access)

    async def recordings(seconds: float) -> list[bytes]:
        told = [recorder for recorder in recorders if recorder.replica not in service.silent]
        return [recorder.recording(seconds).to_json() for recorder in told]

    add_console(app, Sources(recordings, lambda: {"waiting": queue.queued, "ongoing": queue.ongoing}))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    box.update(console=ConsoleServer(f"http://127.0.0.1:{port}", service, asyncio.get_running_loop()), server=server)
    started.set()
    await serving
    for engine in engines:
        await engine.shutdown()


@contextmanager
def running(access: Access | None = None) -> Iterator[ConsoleServer]:
    started, box = threading.Event(), {}  # type: tuple[threading.Event, dict[str, Any]]
    thread = threading.Thread(target=lambda: asyncio.run(serve(started, box, access)), daemon=True)
    thread.start()
    assert started.wait(60)
    yield box["console"]
    box["server"].should_exit = True
    thread.join(30)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


@pytest.fixture(scope="session")
def console() -> Iterator[ConsoleServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def keyed() -> Iterator[ConsoleServer]:
    """A server that wants one of `KEYS`."""
    ring = KeyRing({hash_key(key): tenant for key, tenant in KEYS.items()})
    with running(Access(lambda: ring)) as server:
        yield server


@pytest.fixture
def says(console: ConsoleServer) -> Iterator[list[str]]:
    """What the model says instead of its nonsense, over and over."""
    console.service.override[:] = ["Paris is the capital of France. "]
    yield console.service.override
    console.service.override.clear()


@pytest.fixture
def service(console: ConsoleServer) -> Iterator[Engines]:
    """Its `answer` is what the model says, once."""
    console.service.answer = "Paris is the capital of France."
    yield console.service
    console.service.answer = ""


@pytest.fixture
def slow(console: ConsoleServer) -> Iterator[None]:
    """240 steps take five seconds."""
    console.service.pace.step_s = 0.02
    yield
    console.service.pace.step_s = 0.0


# Not for the session: its event loop stays in this thread, where asyncio's own then cannot run.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        # Its sandbox needs rights that a container's root does not have; the page is our own.
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_complaint(message: "ConsoleMessage") -> bool:
    """Whether the browser reports a fault of the page; that the server refused something is
    none."""
    refused = re.search(r"responded with a status of (400|401|403|503)", message.text)
    return message.type in ("error", "warning") and refused is None


@contextmanager
def watched_page(browser: "Browser", server: ConsoleServer, **how: Any) -> Iterator["Page"]:
    """A fresh page on the console that may talk to nobody else and must not complain."""
    context = browser.new_context(**{"viewport": {"width": 1366, "height": 900}, **how})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if is_complaint(message) else None)
    page.on(
        "request", lambda asked: None if asked.url.startswith((server.url, "blob:")) else complaints.append(asked.url)
    )
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.goto(server.url)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def page(browser: "Browser", console: ConsoleServer) -> Iterator["Page"]:
    with watched_page(browser, console) as page:
        yield page
