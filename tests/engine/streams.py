"""An engine whose outputs are read in this process, by a generator for each request."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Self

from serve_app.core.request import EngineRequest
from serve_app.core.results import RequestOutputs, TokenDelta
from serve_app.engine.async_engine import AsyncEngine, Publish
from serve_app.engine.core import EngineCore


class StreamEngine(AsyncEngine):
    """`listeners` get every batch as well."""

    listeners: list[Publish]
    _readers: dict[str, asyncio.Queue[RequestOutputs]]

    @classmethod
    async def start_with(cls, build: Callable[[], EngineCore], *, stream_interval_s: float = 0.0) -> Self:
        engine = cls(build, stream_interval_s=stream_interval_s)
        engine.listeners, engine._readers = [], {}
        await engine.start(engine._deliver)
        return engine

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """One item per flush that has outputs of the request; raises what ends it. Closing it
        aborts the request."""
        name, reader, ended = request.request_id, asyncio.Queue[RequestOutputs](), False
        self.submit(request)
        self._readers[name] = reader
        try:
            while not ended:
                _, deltas, ended, error = await reader.get()
                if deltas:
                    yield deltas
                if error is not None:
                    raise error
        finally:
            if self._readers.get(name) is reader:
                del self._readers[name]
                self.abort(name)

    def _deliver(self, batch: list[RequestOutputs]) -> None:
        for outputs in batch:
            if (reader := self._readers.get(outputs.request_id)) is not None:
                reader.put_nowait(outputs)
        for publish in self.listeners:
            publish(batch)
