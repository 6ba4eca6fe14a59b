"""Serialization between ingress and replica: small, plain tuples and dicts, without our classes.

An attempt's items are lists of deltas, one per flush that has outputs of it. An error dict
(`RequestError.to_wire`) ends them instead. A heartbeat is a replica's load. `link` transports them.
"""

from typing import Any

from serve_app.core.request import EngineRequest
from serve_app.core.results import NO_RESULTS, FinishReason, RequestOutputs, Results, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import SchedulerStats
from serve_app.errors import from_wire
from serve_app.fleet.load import ReplicaLoad

HEARTBEAT_S = 1.0
"""Time between two heartbeats of a replica."""

WireRequest = dict[str, Any]
WireDelta = tuple[Any, ...]
WireLoad = tuple[int, int, int, int, int, float | None]
WireItem = list[WireDelta] | dict[str, Any]


def pack_request(request: EngineRequest, attempt_id: str) -> WireRequest:
    """Return `request` as plain data. The replica's engine uses `attempt_id` as its id."""
    return {
        "attempt_id": attempt_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "params": request.params.to_wire(),
        "prior_output_ids": [list(ids) for ids in request.prior_output_ids],
        "finished_choices": list(request.finished_choices),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }


def unpack_request(data: WireRequest) -> EngineRequest:
    """Rebuild the request, with its attempt's id. Raises `InvalidRequestError`."""
    return EngineRequest(
        request_id=data["attempt_id"],
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        params=SamplingParams.from_wire(data["params"]),
        prior_output_ids=tuple(tuple(ids) for ids in data["prior_output_ids"]),
        finished_choices=tuple(data["finished_choices"]),
        cache_salt=data["cache_salt"],
        priority=data["priority"],
    )


def pack_outputs(outputs: RequestOutputs) -> list[tuple[str, WireItem | None]]:
    """Return the outputs as items, each with the attempt's id. None ends the attempt."""
    attempt_id, deltas, ended, error = outputs
    items: list[tuple[str, WireItem | None]] = [(attempt_id, pack_deltas(deltas))] if deltas else []
    if error is not None:
        items.append((attempt_id, error.to_wire()))
    if ended:
        items.append((attempt_id, None))
    return items


def pack_deltas(deltas: list[TokenDelta]) -> list[WireDelta]:
    """Pack one flush's outputs of one request.

    Empty trailing fields are omitted to keep deltas small.
    """
    return [_pack_delta(delta) for delta in deltas]


def unpack_item(request_id: str, item: WireItem) -> list[TokenDelta]:
    """Return the deltas, or raise the `RequestError` sent instead of them."""
    if isinstance(item, dict):
        raise from_wire(item)
    return [_unpack_delta(request_id, *delta) for delta in item]


def pack_load(stats: SchedulerStats, step: int, step_age_s: float | None) -> WireLoad:
    """Pack the engine's state, the number of its last step, and the age of the current step."""
    free = stats.blocks_total - stats.blocks_used
    return stats.running, stats.waiting, free, stats.blocks_total, step, step_age_s


def unpack_load(load: WireLoad, now: float) -> ReplicaLoad:
    """Return the load from `pack_load`, as of `now` (monotonic seconds)."""
    return ReplicaLoad(*load, at=now)


def _pack_delta(delta: TokenDelta) -> WireDelta:
    head = (delta.choice, delta.offset, list(delta.token_ids))
    results, prompt_results = delta.results, delta.prompt_results
    if delta.finish_reason is None and delta.num_cached_tokens is None and not results and not prompt_results:
        return head
    reason = None if delta.finish_reason is None else delta.finish_reason.value
    error = None if delta.error is None else delta.error.to_wire()
    return (*head, reason, delta.num_cached_tokens, error, results, prompt_results)


def _unpack_delta(
    request_id: str,
    choice: int,
    offset: int,
    token_ids: list[int],
    finish_reason: str | None = None,
    num_cached_tokens: int | None = None,
    error: dict[str, Any] | None = None,
    results: Results = NO_RESULTS,
    prompt_results: Results = NO_RESULTS,
) -> TokenDelta:
    reason = None if finish_reason is None else FinishReason(finish_reason)
    ids = tuple(token_ids)
    cause = None if error is None else from_wire(error)
    return TokenDelta(request_id, choice, offset, ids, reason, num_cached_tokens, cause, results, prompt_results)
