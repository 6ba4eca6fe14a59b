"""Reports one HTTP request to the observer, the log and its tenant's account."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from serve_app.api.request_events import Endpoint, Outcome, RequestLog, RequestObserver, RequestSummary
from serve_app.api.service import ModelCard, RequestContext
from serve_app.core.request import EngineRequest
from serve_app.errors import OverloadedError, RequestError, RequestTimeoutError, UnavailableError
from serve_app.tenants.accounts import Charge
from serve_app.tenants.ledger import Spent

_MAX_ENGINE_IDS = 128
_REFUSALS = (OverloadedError, RequestTimeoutError, UnavailableError)


class RequestTracker:
    """A context around the whole request. Does not suppress exceptions."""

    def __init__(
        self,
        observer: RequestObserver,
        log: RequestLog,
        endpoint: Endpoint,
        request_id: str,
        card: ModelCard,
        charge: Charge,
        traceparent: str | None = None,
    ) -> None:
        self._observer = observer
        self._log = log
        self._endpoint: Endpoint = endpoint
        self._request_id = request_id
        self._card = card
        self._charge = charge
        self._settled = False
        self._traceparent = traceparent
        self._started_at = time.monotonic()
        self._computed_prompt_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        self._output_tokens = 0
        self._reasoning_tokens = 0
        self._queue_s: float | None = None
        self._first_token_s: float | None = None
        self._requests: Sequence[EngineRequest] = ()
        self._contexts: Sequence[RequestContext] = ()
        self.sent_error: Exception | None = None
        """An error that was sent as an event of the stream, and so is not raised."""

    def generates(self, requests: Sequence[EngineRequest], contexts: Sequence[RequestContext]) -> None:
        """Set the request's engine requests, before generation starts."""
        self._requests, self._contexts = requests, contexts

    def queued(self, seconds: float, prompt_tokens: int) -> None:
        """A prompt of `prompt_tokens` tokens was admitted; see `RequestObserver.queued`."""
        self._computed_prompt_tokens += prompt_tokens
        self._queue_s = max(seconds, self._queue_s or 0.0)
        self._observer.queued(seconds)

    def found_cached(self, prompt: int, tokens: int) -> None:
        """`tokens` tokens of prompt number `prompt` were found in the prefix cache."""
        self._cached_tokens[prompt] = tokens

    def tokens(self, count: int, gap: float | None, reasoning: int) -> None:
        """See `RequestObserver.tokens`.

        `reasoning` more tokens of the choice are known to be reasoning.
        """
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._started_at
            self._observer.first_token(self._first_token_s)
        self._output_tokens += count
        self._reasoning_tokens += reasoning
        self._observer.tokens(count, gap)

    def settle(self, error: BaseException | None = None) -> None:
        """Charge the tenant, once.

        Called before the client receives the end, so a finished request is always recorded. A
        request that failed without a token costs nothing. One that was cancelled during prefill
        costs its prompt.
        """
        if self._settled:
            return
        self._settled = True
        outcome = _outcome(error)
        spent = None
        if self._computed_prompt_tokens and (self._output_tokens or outcome is not Outcome.FAILED):
            spent = Spent(
                key=self._charge.key,
                model=self._card.name,
                revision=self._card.fingerprint,
                request_id=self._request_id,
                endpoint=self._endpoint,
                outcome=outcome,
                prompt_tokens=self._computed_prompt_tokens,
                cached_tokens=sum(self._cached_tokens.values()),
                output_tokens=self._output_tokens,
                reasoning_tokens=self._reasoning_tokens,
                seconds=time.monotonic() - self._started_at,
            )
        self._charge.settle(spent)
        tokens = (0, 0, 0) if spent is None else (spent.prompt_tokens, spent.cached_tokens, spent.output_tokens)
        self._observer.charged(self._charge.key, outcome, *tokens)

    def __enter__(self) -> Self:
        self._observer.started(self._endpoint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        final = error or self.sent_error
        self.settle(final)
        if isinstance(final, _REFUSALS):
            self._observer.refused(final.code or "other")
        summary = self._summary(final)
        self._observer.finished(
            self._endpoint, summary.outcome, summary.prompt_tokens, summary.output_tokens, summary.seconds
        )
        self._log(summary)

    def _summary(self, error: BaseException | None) -> RequestSummary:
        seconds = time.monotonic() - self._started_at
        outcome = _outcome(error)
        replicas = dict.fromkeys(name for context in self._contexts for name in context.replicas)
        return RequestSummary(
            request_id=self._request_id,
            endpoint=self._endpoint,
            outcome=outcome,
            error=None if error is None or outcome is Outcome.CANCELLED else _name(error),
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self._requests),
            output_tokens=self._output_tokens,
            queue_s=self._queue_s,
            first_token_s=self._first_token_s,
            seconds=seconds,
            started_at=time.time() - seconds,
            replicas=tuple(replicas),
            engine_ids=tuple(request.request_id for request in self._requests[:_MAX_ENGINE_IDS]),
            key=self._charge.key or None,
            traceparent=self._traceparent,
        )


def _name(error: BaseException) -> str:
    return error.code or error.type if isinstance(error, RequestError) else "internal_error"


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
