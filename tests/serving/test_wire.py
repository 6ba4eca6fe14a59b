"""What goes over the wire comes back the same, and is plain enough for any serializer."""

import json

import pytest

from serve_app.core.output import FinishReason, TokenDelta, TokenLogprob
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import OverloadedError, RequestError
from serve_app.serving.wire import pack_deltas, pack_request, unpack_deltas, unpack_request

LOGPROB = TokenLogprob(7, -0.5, ((7, -0.5), (3, -1.25)))


def test_requests() -> None:
    params = SamplingParams(n=2, temperature=0.5, seed=4, stop_token_ids=(9,), logit_bias=((3, -2.0),), logprobs=2)
    request = EngineRequest("r", (1, 2, 3), params, prior_output_ids=((4,), ()), cache_salt="s", priority=-1)
    assert unpack_request(pack_request(request)) == request
    assert unpack_request(json.loads(json.dumps(pack_request(request)))) == request


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("r", 0, 5, (8, 9)),
        TokenDelta("r", 1, 0, (8,), num_cached_tokens=16),
        TokenDelta("r", 1, 3, (), finish_reason=FinishReason.ERROR, error="broken"),
        TokenDelta("r", 0, 3, (7,), logprobs=(LOGPROB,), prompt_logprobs=(LOGPROB, LOGPROB)),
        TokenDelta("r", 0, 3, (7,), finish_reason=FinishReason.STOP, num_cached_tokens=0),
    ],
)
def test_deltas(delta: TokenDelta) -> None:
    packed = pack_deltas([delta, delta])
    assert unpack_deltas("r", packed) == [delta, delta]
    assert unpack_deltas("r", json.loads(json.dumps(packed))) == [delta, delta]


def test_the_usual_delta_is_short() -> None:
    assert pack_deltas([TokenDelta("a-long-request-id", 0, 5, (8,))]) == [(0, 5, [8])]


def test_refusals_are_raised() -> None:
    with pytest.raises(RequestError) as caught:
        unpack_deltas("r", OverloadedError("full", retry_after_s=3.0).to_wire())
    assert (type(caught.value), caught.value.retry_after_s) == (OverloadedError, 3.0)
