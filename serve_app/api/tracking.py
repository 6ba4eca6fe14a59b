"""Tells the observer about one HTTP request: when it started, its tokens, and exactly once how it ended."""

import asyncio
import time
from types import TracebackType
from typing import Self

from serve_app.api.service import Endpoint, Outcome, RequestObserver
from serve_app.errors import OverloadedError, RequestError, RequestTimeoutError, UnavailableError

_REFUSALS = (OverloadedError, RequestTimeoutError, UnavailableError)


class RequestTracker:
    """`with` around the whole request. Passes every exception on."""

    def __init__(self, observer: RequestObserver, endpoint: Endpoint) -> None:
        self._observer = observer
        self._endpoint = endpoint
        self._started_at = time.monotonic()
        self._output_tokens = 0
        self.prompt_tokens = 0
        self.told_error: Exception | None = None
        """An error that the client was told inside its stream, and that is therefore not raised."""

    def queued(self, seconds: float) -> None:
        """See `RequestObserver.queued`."""
        self._observer.queued(seconds)

    def tokens(self, count: int, gap: float | None) -> None:
        """See `RequestObserver.tokens`."""
        if not self._output_tokens:
            self._observer.first_token(time.monotonic() - self._started_at)
        self._output_tokens += count
        self._observer.tokens(count, gap)

    def __enter__(self) -> Self:
        self._observer.started(self._endpoint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._started_at
        told = error or self.told_error
        outcome = _outcome(told)
        if isinstance(told, _REFUSALS):
            self._observer.refused(told.code or "other")
        self._observer.finished(self._endpoint, outcome, self.prompt_tokens, self._output_tokens, seconds)


def _outcome(error: BaseException | None) -> Outcome:
    match error:
        case None:
            return Outcome.COMPLETED
        case asyncio.CancelledError() | GeneratorExit():
            return Outcome.CANCELLED
        case OverloadedError():
            return Outcome.OVERLOADED
        case RequestError() if error.status < 500:
            return Outcome.INVALID
        case _:
            return Outcome.FAILED
