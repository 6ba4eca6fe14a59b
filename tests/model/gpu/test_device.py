"""Which GPU kernels are launched on."""

import threading
from functools import partial

import pytest
import torch

from serve_app.engine.async_engine import AsyncEngine
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.errors import ConfigError
from serve_app.model.options import ModelOptions


async def test_the_named_gpu_is_the_engines_threads_own_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread has a current device, on which Triton launches and events are recorded."""
    current: dict[str, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.update({threading.current_thread().name: device})
    )
    for device in ("cuda", "cuda:1"):
        config = EngineConfig(model=ModelOptions("/no/such/folder", device=device))
        engine = AsyncEngine(partial(EngineCore.load, config))
        with pytest.raises(ConfigError, match="neither"):
            await engine.start(lambda _: None)
    assert current == {"engine": torch.device("cuda:1")}
