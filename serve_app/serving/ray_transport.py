"""The way to the engine replicas through Ray Serve: handle calls, and what Ray's exceptions mean."""

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serve_app.core.request import EngineRequest
from serve_app.errors import EngineError, OverloadedError
from serve_app.serving.attempt import ItemStream, LossReason, ReplicaLostError
from serve_app.serving.feed import FEED_ADDRESS, FedStream, read_feed
from serve_app.serving.replica_set import ReplicaSet
from serve_app.serving.wire import WireLoad, pack_request

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 2.0


class RayTransport:
    """`Transport` over the handle of the engine deployment. The router reads the attempt's id from each call."""

    def __init__(self, engines: DeploymentHandle[Any], replicas: ReplicaSet) -> None:
        self._generate = engines.options(method_name="generate", stream=True)
        self._feed_name = uuid.uuid4().hex
        self._streams: dict[str, FedStream] = {}
        self._replicas = replicas

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None) -> ItemStream:
        """Start an attempt."""
        call = _RayStream(self._generate, pack_request(request, attempt_id, session, self._feed_name))
        return FedStream(call, attempt_id, self._streams)

    async def heartbeats(self, replica_id: str) -> AsyncGenerator[WireLoad, None]:
        """The replica's heartbeats until it ends the feed they come by, whose news go to their attempts."""
        if (replica := self._replicas.get(replica_id)) is None:
            raise ReplicaLostError(LossReason.LEFT)
        try:
            feed = read_feed(replica.metadata[FEED_ADDRESS], self._feed_name, replica_id)
            async with aclosing(feed) as frames:
                async for load, news in frames:
                    for attempt_id, item in news:
                        if (stream := self._streams.get(attempt_id)) is not None:
                            stream.feed(item)
                    yield load
        except OSError:
            raise ReplicaLostError(LossReason.UNAVAILABLE) from None


class _RayStream:
    """A streaming handle call."""

    def __init__(self, method: DeploymentHandle[Any], argument: dict[str, Any]) -> None:
        # In a context of its own: within that of an HTTP request, all its calls would share one id, by which the router
        # tells waiting calls apart.
        self._response: DeploymentResponseGenerator[Any] = contextvars.Context().run(method.remote, argument)

    def __aiter__(self) -> "_RayStream":
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._response)
        except StopAsyncIteration:
            raise
        except asyncio.CancelledError:
            # Ray also raises this when the other side was cancelled.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ReplicaLostError(LossReason.CUT) from None
        except Exception as error:
            raise _meaning(error) from error

    def cancel(self) -> None:
        response = self._response
        response.cancel()
        # Ray forgets a call that was assigned to a replica in this very turn of the event loop: nobody has read it yet.
        assigned = response._replica_result_future
        is_unread = response._replica_result is None and assigned.done() and not assigned.cancelled()
        if is_unread and assigned.exception() is None:
            assigned.result().cancel()


def _meaning(error: Exception) -> Exception:
    if isinstance(error, BackPressureError):
        return OverloadedError("all engine replicas are full", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError):
        return ReplicaLostError(LossReason.UNROUTED)
    if isinstance(error, RequestCancelledError):
        return ReplicaLostError(LossReason.CUT)
    if isinstance(error, ActorDiedError):
        return ReplicaLostError(LossReason.DIED)
    if isinstance(error, RayTaskError):
        logger.error("a replica failed a request", exc_info=error)
        return EngineError("the engine failed the request")
    if isinstance(error, RayError | grpc.RpcError):
        return ReplicaLostError(LossReason.UNAVAILABLE)
    logger.error("the call of a replica failed", exc_info=error)
    return EngineError("the engine failed the request")
