"""Models and engines that many tests share. Loading is slow, so models live as long as the session;
engines do not:
one engine at a time owns a model, because it allocates the model's KV pool."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from serve_app.checkpoints.model_files import locate_model
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model import loader
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.quiet import quiet
from serve_app.model.sources import checkpoint
from tests.durations import Durations
from tests.engine.streams import StreamEngine
from tests.fleets import fleet, references, small_model
from tests.models import tiny_model

hypothesis.settings.register_profile("tests", deadline=None)  # a busy machine fails no test
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))


__all__ = ["fleet", "references", "small_model"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models spend more time in handing out work than in doing it, and other tests need the
    other core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama() -> PagedModel:
    """Random weights, vocabulary 200, context 256, float32. Steps take about a millisecond."""
    return loader.from_module(tiny_model("llama", torch.float32), max_model_len=256)


@pytest.fixture(scope="session")
def default_module() -> Any:
    """The default model as transformers loads it, float32, untouched."""
    options = ModelOptions(dtype="float32")
    path = locate_model(options.model).path
    assert isinstance(path, Path)
    with quiet():
        return checkpoint._load_gguf(path, options, torch.device("cpu"), lambda stage, fraction: None)


@pytest.fixture(scope="session")
def default_model(default_module: Any) -> PagedModel:
    """The default model as the engine runs it, float32 on the CPU, context 512."""
    return loader.from_module(default_module, max_model_len=512)


@pytest.fixture
async def tiny_engine(tiny_llama: PagedModel) -> AsyncIterator[StreamEngine]:
    """A running engine on `tiny_llama`: 16 slots, 64 tokens a step."""
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_gib=0.1)
    engine = await StreamEngine.start_with(lambda: EngineCore(tiny_llama, config))
    yield engine
    await engine.shutdown()


@pytest.fixture
async def default_engine(default_model: PagedModel) -> AsyncIterator[StreamEngine]:
    """A running engine on the default model: 16 slots, 64 tokens a step."""
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_gib=1.0)
    engine = await StreamEngine.start_with(lambda: EngineCore(default_model, config))
    yield engine
    await engine.shutdown()
