"""Which requests are remembered as poison, having ended replicas, and for how long."""

from dataclasses import replace

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet import poison_requests
from serve_app.fleet.poison_requests import PoisonRequests

POISON = EngineRequest("r", (1, 2, 3), SamplingParams(max_tokens=5, seed=1))


def test_equal_requests_are_known_whatever_their_seed_and_id_until_some_minutes_have_passed() -> None:
    known = PoisonRequests()
    known.add(POISON, 100.0)
    again = replace(POISON, request_id="s", params=replace(POISON.params, seed=2))
    assert known.knows(again, 101.0)
    assert not known.knows(replace(POISON, prompt_token_ids=(1, 2)), 101.0)
    assert not known.knows(replace(POISON, params=replace(POISON.params, max_tokens=6)), 101.0)
    known.add(POISON, 200.0)
    assert known.knows(again, 100.0 + poison_requests._REMEMBERED_S)
    assert not known.knows(again, 200.0 + poison_requests._REMEMBERED_S)


def test_only_so_many_are_remembered() -> None:
    known = PoisonRequests()
    requests = [replace(POISON, prompt_token_ids=(number,)) for number in range(poison_requests._MAX_REMEMBERED + 1)]
    for request in requests:
        known.add(request, 0.0)
    assert not known.knows(requests[0], 1.0)
    assert all(known.knows(request, 1.0) for request in requests[1:])
