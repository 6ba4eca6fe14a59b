"""A replica whose engine fails to start adds no lines to the error that Ray reports."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import tests.quiet_ray  # noqa: F401 (Ray Serve warns when it is imported)
from serve_app.engine.async_engine import AsyncEngine
from serve_app.errors import ConfigError
from serve_app.fleet.link import LinkServer
from serve_app.serving.replica import EngineReplica


def _fail() -> NoReturn:
    raise ConfigError("model: no weights")


@pytest.mark.parametrize("engine", ["failed", "not yet made"])
async def test_it_ends_without_a_line(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    # Not an instance: Python would call its asynchronous `__del__` again, and warn.
    replica: Any = SimpleNamespace(_is_started=EngineReplica._is_started)
    if engine == "failed":
        replica._engine = AsyncEngine(_fail)
        replica._links = LinkServer(replica._engine.submit, replica._engine.abort, lambda: None)
        replica.check_health = partial(EngineReplica.check_health, replica)
        with pytest.raises(ConfigError, match="no weights"):
            await replica._engine.start(replica._links.publish)
        replica._engine._thread.join()
    await EngineReplica.__del__(replica)
    assert caplog.messages == []
