"""Clients that leave, and queues that are full, over the scripted service."""

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.api.request_events import Outcome
from tests.api.conftest import Api

BODY = b'{"prompt": "x", "stream": %b}'


class Client:
    """One request whose client leaves when told to."""

    def __init__(self, api: Api, stream: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.got_first = asyncio.Event()
        self._leave = asyncio.Event()
        self._body: bytes | None = BODY % (b"true" if stream else b"false")
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [],
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(api.app(scope, self._receive, self._take))

    async def leave(self) -> None:
        self._leave.set()
        await self.task

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _take(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.got_first.set()


async def running(api: Api, count: int) -> None:
    while api.service.running < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_the_generation_at_once(api: Api, stream: bool) -> None:
    api.service.hold = asyncio.Event()
    client = Client(api, stream)
    await running(api, 1)
    if stream:
        await client.got_first.wait()
    await client.leave()
    assert api.service.running == 0
    assert api.admission.ongoing == 0
    assert [end[1] for end in api.observer.ended] == [Outcome.CANCELLED]
    assert api.observer.num_tokens == 1


async def test_leaving_while_queued_frees_the_place(api: Api) -> None:
    api.service.hold = asyncio.Event()
    clients = [Client(api, stream=True) for _ in range(6)]
    await running(api, 4)
    assert (api.admission.ongoing, api.admission.queued) == (4, 2)
    await clients[4].leave()
    assert (api.admission.queued, clients[4].sent) == (1, [])
    api.service.hold.set()
    await asyncio.gather(*(client.task for client in clients))
    assert len(api.service.requests) == 5


async def test_cancelling_the_server_side_closes_the_generation(api: Api) -> None:
    api.service.hold = asyncio.Event()
    client = Client(api, stream=True)
    await client.got_first.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert api.service.running == 0


async def test_a_full_queue_answers_429_with_a_time_to_come_back(api: Api) -> None:
    api.service.hold = asyncio.Event()
    clients = [Client(api, stream=False) for _ in range(6)]
    await running(api, 4)
    answer = await api.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    invalid = await api.http.post("/v1/completions", json={"prompt": 1})
    assert invalid.status_code == 400  # what is wrong stays wrong, however full the queue
    api.service.hold.set()
    await asyncio.gather(*(client.task for client in clients))
    assert all(client.sent[0]["status"] == 200 for client in clients)
    assert [end[1] for end in api.observer.ended].count(Outcome.OVERLOADED) == 1


async def test_many_prompts_take_many_places_and_share_the_turns(api: Api) -> None:
    answer = await api.http.post("/v1/completions", json={"prompt": list("abcde"), "max_tokens": 1})
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(5))
    assert len(api.service.requests) == 5
    api.service.hold = asyncio.Event()
    task = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": list("abcde")}))
    await running(api, 4)
    two_more: httpx.Response = await api.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert (two_more.status_code, two_more.json()["error"]["code"]) == (429, "queue_share")
    api.service.hold.set()
    assert (await task).status_code == 200


async def test_an_error_of_one_prompt_ends_the_others(api: Api) -> None:
    api.service.error, api.service.error_at = RuntimeError("boom"), 2
    answer = await api.http.post("/v1/completions", json={"prompt": list("abcde")})
    assert answer.status_code == 500
