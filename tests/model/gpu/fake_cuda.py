"""What torch.cuda's graphs promise, without a GPU: a capture ends on its own stream, in a pool that
no failed capture has had, and a replay runs no Python, so it keeps nothing alive."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class FakeCuda:
    """Stands in for torch.cuda's functions while a test runs.

    capturing: streams in capture; broken: whether ending a capture fails, as it does after some
    errors in it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing: set[object] = set()
        self.spoilt: set[object] = set()
        self.broken = False
        self.stream: object = Stream(self)
        for name, value in {
            "graph_pool_handle": object,
            "Stream": lambda device: Stream(self),
            "CUDAGraph": lambda: Graph(self),
            "stream": self.on,
            "current_stream": lambda device: self.stream,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class Stream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wait_stream(self, other: object) -> None:
        if self in self.cuda.capturing or other in self.cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")


class Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        if pool in self.cuda.spoilt:
            raise RuntimeError("already recording to this pool")
        self.pool, self.stream = pool, self.cuda.stream
        self.cuda.capturing.add(self.stream)
        self.cuda.spoilt.add(pool)

    def capture_end(self) -> None:
        if self.cuda.stream is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.cuda.capturing.remove(self.stream)
        if self.cuda.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.spoilt.remove(self.pool)

    def replay(self) -> None:
        """The device's work alone."""
