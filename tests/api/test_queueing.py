"""The queue as clients meet it: whose request is whose, how long it may take, and what a refusal
says."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.request_events import Outcome
from serve_app.errors import UnavailableError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, build_api
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

Post = asyncio.Task[httpx.Response]


def post(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> Post:
    body = {"prompt": "x", "max_tokens": 2, **fields}
    return asyncio.create_task(api.http.post("/v1/completions", json=body, headers=headers))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def held(api: Api, running: int, queued: int) -> None:
    while (api.service.running, api.admission.queued) != (running, queued):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def fill(api: Api, headers: dict[str, str] | None = None, **fields: Any) -> list[Post]:
    """Four running and two waiting requests: all that fits."""
    api.service.hold = asyncio.Event()
    posts = [post(api, headers, seed=seed, **fields) for seed in range(6)]
    await held(api, running=4, queued=2)
    return posts


async def finish(api: Api, posts: list[Post]) -> list[int]:
    api.service.hold.set()
    return [answer.status_code for answer in await asyncio.gather(*posts)]


NEXT = [
    ({}, {}, False),
    ({"user": "a"}, {"user": "b"}, True),
    ({"user": "a"}, {}, True),
    ({"user": "a"}, {"user": "a"}, False),
]


@pytest.mark.parametrize(("fields", "next_fields", "taken"), NEXT)
async def test_a_client_is_a_user(api: Api, fields: dict[str, Any], next_fields: dict[str, Any], taken: bool) -> None:
    """A queue full of one client takes another's request, in the place of the newest, and none of
    the same client's."""
    posts = await fill(api, **fields)
    another = post(api, **next_fields)
    refused: Post = posts[-1] if taken else another
    answer = await refused
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == ("queue_share" if taken else "queue_full")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert "x-should-retry" not in answer.headers
    assert (await finish(api, [*posts, another])).count(200) == 6
    assert api.observer.refusals == [answer.json()["error"]["code"]]
    assert [end[1] for end in api.observer.ended].count(Outcome.OVERLOADED) == 1


async def test_a_stream_that_gives_way_has_not_begun(api: Api) -> None:
    posts = await fill(api, stream=True)
    another = post(api, user="b", stream=True)
    answer = await posts[-1]
    assert (answer.status_code, answer.headers["content-type"]) == (429, "application/json")
    assert (await finish(api, [*posts[:-1], another])) == [200] * 6


async def test_who_sends_a_new_key_with_every_request_gains_nothing(api: Api) -> None:
    """Without a keys file no key is known, and who is not known shares one line."""
    posts = await fill(api, bearer("a"))
    answer = await post(api, bearer("b"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert await finish(api, posts) == [200] * 6


async def test_a_waiting_request_is_answered_at_its_deadline(api: Api) -> None:
    api.service.hold = asyncio.Event()
    posts = [post(api) for _ in range(4)]
    await held(api, running=4, queued=0)
    answer = await post(api, {"x-request-timeout": "0.05"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    assert (api.admission.queued, api.observer.refusals) == (0, ["request_timeout"])
    await finish(api, posts)


async def test_the_deadline_is_capped_and_goes_on_to_the_service(tokenizer: Tokenizer) -> None:
    now = time.monotonic()  # standing still
    limits = make_limits(request_timeout_s=60.0)
    api = build_api(ScriptedService(tokenizer), AsyncAdmissionQueue(4, 2, clock=lambda: now), limits)
    async with api.http:
        for headers in ({}, {"x-request-timeout": "2.5"}, {"x-request-timeout": "61"}, {"x-session-id": "chat 7"}):
            assert (await post(api, headers)).status_code == 200
    assert [context.deadline for context in api.service.contexts] == [now + 60, now + 2.5, now + 60, now + 60]
    assert [context.session for context in api.service.contexts] == [None, None, None, "chat 7"]


@pytest.mark.parametrize("given", ["", "0", "0.0", "-1", "nan", "inf", "1e3", "1_0", "five", " ", "1,5", "9" * 10, "٣"])
async def test_a_timeout_that_is_none_is_refused_by_name(api: Api, given: str) -> None:
    body = b'{"prompt": "x"}'
    headers = [(b"content-type", b"application/json"), (b"x-request-timeout", given.encode())]
    answer = await api.http.post("/v1/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "x-request-timeout")
    assert "`x-request-timeout`" in error["message"]


async def test_a_session_name_is_bounded(api: Api) -> None:
    answer = await post(api, {"x-session-id": "s" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id")


async def test_choices_are_counted(api: Api) -> None:
    api.service.hold = asyncio.Event()
    posts = [post(api, n=3), post(api, n=3)]
    await held(api, running=2, queued=0)
    assert api.admission.ongoing == 6
    assert (await post(api, n=2)).json()["error"]["code"] == "queue_share"
    posts += [post(api), post(api)]
    await held(api, running=2, queued=2)
    assert (await post(api)).status_code == 429
    assert await finish(api, posts) == [200] * 4


async def test_without_a_replica_nothing_is_queued(api: Api) -> None:
    posts = await fill(api)
    api.service.ready = UnavailableError("no engine replica is running", retry_after_s=2.0)
    answer = await post(api)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert (await post(api, max_tokens=0.5)).status_code == 400
    assert api.observer.refusals == ["unavailable"]
    await finish(api, posts)


async def test_waits_are_told(api: Api) -> None:
    assert await finish(api, await fill(api)) == [200] * 6
    assert len(api.observer.waits) == 6
    assert all(wait >= 0 for wait in api.observer.waits)


async def test_choices_that_are_over_are_told_to_the_service(api: Api) -> None:
    """So that a failover does not compute on what a stop string has ended."""
    assert (await post(api, stop=["capital"], max_tokens=50, n=2)).status_code == 200
    assert api.service.contexts[0].ended_choices == {0, 1}
