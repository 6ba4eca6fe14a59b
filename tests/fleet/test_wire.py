"""What goes over the wire comes back the same, and is plain enough for any serializer."""

import json
from dataclasses import replace

import msgpack
import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, FinishReason, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import SchedulerStats
from serve_app.errors import InvalidRequestError, OverloadedError, RequestError
from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.wire import pack_deltas, pack_load, pack_request, unpack_item, unpack_load, unpack_request

LOGPROB = TokenLogprob(7, -0.5, ((7, -0.5), (3, -1.25)))


def test_requests() -> None:
    params = SamplingParams(n=2, temperature=0.5, seed=4, stop_token_ids=(9,), logit_bias=((3, -2.0),), logprobs=2)
    request = EngineRequest(
        "r.2", (1, 2, 3), params, prior_output_ids=((4,), (5, 6)), finished_choices=(1,), cache_salt="s", priority=-1
    )
    data = pack_request(replace(request, request_id="r"), "r.2")
    assert unpack_request(data) == request, "an engine knows a request by its attempt's id"
    assert unpack_request(json.loads(json.dumps(data))) == request


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("r", 0, 5, (8, 9)),
        TokenDelta("r", 1, 0, (8,), num_cached_tokens=16),
        TokenDelta(
            "r",
            0,
            3,
            (7,),
            results={LOGPROBS: (LOGPROB,)},
            prompt_results={LOGPROBS: (LOGPROB,) * 2, "more": ((1.0,),)},
        ),
        TokenDelta("r", 0, 3, (7,), finish_reason=FinishReason.STOP, num_cached_tokens=0),
    ],
)
def test_deltas(delta: TokenDelta) -> None:
    packed = pack_deltas([delta, delta])
    assert unpack_item("r", packed) == [delta, delta]
    assert unpack_item("r", msgpack.unpackb(msgpack.packb(packed), use_list=False)) == [delta, delta]


def test_errors() -> None:
    error = InvalidRequestError("no token is left", param="temperature", code="no_token_left")
    packed = pack_deltas([TokenDelta("r", 1, 3, (), finish_reason=FinishReason.ERROR, error=error)])
    [delta] = unpack_item("r", msgpack.unpackb(msgpack.packb(packed), use_list=False))
    assert delta.finish_reason is FinishReason.ERROR
    assert isinstance(delta.error, InvalidRequestError)
    assert delta.error.to_wire() == error.to_wire()


def test_loads() -> None:
    stats = SchedulerStats(waiting=3, running=2, blocks_total=10, blocks_used=4, blocks_cached=1)
    load = ReplicaLoad(running=2, waiting=3, free_blocks=6, total_blocks=10, step=17, step_age_s=0.25, at=5.0)
    assert unpack_load(json.loads(json.dumps(pack_load(stats, 17, 0.25))), 5.0) == load


def test_the_usual_delta_is_short() -> None:
    assert pack_deltas([TokenDelta("a-long-request-id", 0, 5, (8,))]) == [(0, 5, [8])]


def test_refusals_are_raised() -> None:
    with pytest.raises(RequestError) as caught:
        unpack_item("r", OverloadedError("full", retry_after_s=3.0).to_wire())
    assert (type(caught.value), caught.value.retry_after_s) == (OverloadedError, 3.0)
