"""What travels between ingress and replica: plain tuples and dicts, small, with nothing that needs our classes to load.

An attempt's items are lists of deltas, one per delivery with news of it. One error dict (`RequestError.to_wire`) ends
them instead. A heartbeat is a replica's load. How they travel is `link`'s matter.
"""

from typing import Any

from serve_app.core.output import FinishReason, SchedulerStats, TokenDelta, TokenLogprob
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import from_wire
from serve_app.serving.replica_set import ReplicaLoad

HEARTBEAT_S = 1.0
"""Between two heartbeats of a replica."""

WireRequest = dict[str, Any]
WireDelta = tuple[Any, ...]
WireLoad = tuple[int, int, int, int, int, float | None]
WireItem = list[WireDelta] | dict[str, Any]


def pack_request(request: EngineRequest, attempt_id: str) -> WireRequest:
    """`request` as plain data. The replica's engine knows it by `attempt_id`."""
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
    """The request that `pack_request` described, under its attempt's id. Raises `InvalidRequestError`."""
    return EngineRequest(
        request_id=data["attempt_id"],
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        params=SamplingParams.from_wire(data["params"]),
        prior_output_ids=tuple(tuple(ids) for ids in data["prior_output_ids"]),
        finished_choices=tuple(data["finished_choices"]),
        cache_salt=data["cache_salt"],
        priority=data["priority"],
    )


def pack_deltas(deltas: list[TokenDelta]) -> list[WireDelta]:
    """A step's news of one request. The usual delta is a short tuple: trailing fields without news are left out."""
    return [_pack_delta(delta) for delta in deltas]


def unpack_item(request_id: str, item: WireItem) -> list[TokenDelta]:
    """The deltas; raises the `RequestError` that travels in place of them."""
    if isinstance(item, dict):
        raise from_wire(item)
    return [_unpack_delta(request_id, *delta) for delta in item]


def pack_load(stats: SchedulerStats, step: int, step_age_s: float | None) -> WireLoad:
    """The engine's state, the number of its last step, and how long the current step has been going on."""
    free = stats.blocks_total - stats.blocks_used
    return stats.running, stats.waiting, free, stats.blocks_total, step, step_age_s


def unpack_load(load: WireLoad, now: float) -> ReplicaLoad:
    """The load that `pack_load` described, as of `now` (monotonic seconds)."""
    return ReplicaLoad(*load, at=now)


def _pack_delta(delta: TokenDelta) -> WireDelta:
    head = (delta.choice, delta.offset, list(delta.token_ids))
    if (
        delta.finish_reason is None
        and not delta.logprobs
        and not delta.prompt_logprobs
        and delta.num_cached_tokens is None
    ):
        return head
    return (
        *head,
        delta.finish_reason.value if delta.finish_reason is not None else None,
        delta.num_cached_tokens,
        delta.error,
        [_pack_logprob(entry) for entry in delta.logprobs],
        [_pack_logprob(entry) for entry in delta.prompt_logprobs],
    )


def _unpack_delta(
    request_id: str,
    choice: int,
    offset: int,
    token_ids: list[int],
    finish_reason: str | None = None,
    num_cached_tokens: int | None = None,
    error: str | None = None,
    logprobs: list[Any] | tuple[()] = (),
    prompt_logprobs: list[Any] | tuple[()] = (),
) -> TokenDelta:
    return TokenDelta(
        request_id=request_id,
        choice=choice,
        offset=offset,
        token_ids=tuple(token_ids),
        logprobs=tuple(_unpack_logprob(*entry) for entry in logprobs),
        prompt_logprobs=tuple(_unpack_logprob(*entry) for entry in prompt_logprobs),
        finish_reason=FinishReason(finish_reason) if finish_reason is not None else None,
        num_cached_tokens=num_cached_tokens,
        error=error,
    )


def _pack_logprob(entry: TokenLogprob) -> tuple[int, float, list[tuple[int, float]]]:
    return entry.token_id, entry.logprob, list(entry.top)


def _unpack_logprob(token_id: int, logprob: float, top: list[Any]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, tuple((int(other), float(value)) for other, value in top))
