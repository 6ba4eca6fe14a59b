"""What surrounds every request, spoken to in ASGI messages: sizes, times, ids."""

import asyncio
import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.errors import RequestError
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, build_api
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

BODY = b'{"prompt": "x"}'


async def send(
    api: Api,
    messages: Sequence[dict[str, Any]],
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "/v1/completions",
    source: str = "test",
) -> tuple[int | None, dict[bytes, bytes], dict[str, Any], int]:
    """(status, headers, JSON body, how many of `messages` were read); after the last message
    nothing more comes."""
    sent: list[dict[str, Any]] = []
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def take(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers], "http_version": "1.1", "root_path": "",
        "scheme": "http",
        "server": ("test", 80), "client": (source, 1),
    }  # fmt: skip
    await api.app(scope, receive, take)
    status = sent[0]["status"] if sent else None
    body = b"".join(message.get("body", b"") for message in sent)
    return status, dict(sent[0]["headers"]) if sent else {}, json.loads(body or b"{}"), len(messages) - len(left)


def part(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_declared_too_large_is_not_read(api: Api) -> None:
    status, headers, answer, num_read = await send(api, [part(b"x" * 10)], [(b"content-length", b"1000001")])
    assert (status, num_read, headers[b"connection"]) == (413, 0, b"close")
    assert answer["error"]["code"] == "payload_too_large"
    assert "1000000" in answer["error"]["message"]


async def test_an_undeclared_body_is_read_up_to_the_limit(api: Api) -> None:
    status, headers, _, num_read = await send(api, [part(b"x" * 250_000, more=True)] * 100)
    assert (status, num_read, headers[b"connection"]) == (413, 5, b"close")


async def test_large_bodies_of_many_clients_are_bounded_together(api: Api) -> None:
    api.service.hold = asyncio.Event()
    large = b'{"prompt": "x", "user": "%b"}' % (b" " * 900_000)
    # 1.8 of 2 MB
    slow = [asyncio.create_task(send(api, [part(large[:-1], more=True)])) for _ in range(2)]
    await asyncio.sleep(0)
    status, _, answer, _ = await send(api, [part(large)])
    assert (status, answer["error"]["code"]) == (429, "bodies_full")
    assert api.observer.refusals == ["bodies_full"]
    assert max(api.observer.body_bytes) == 2 * len(large[:-1])
    assert [result[0] for result in await asyncio.gather(*slow)] == [408, 408]
    assert api.observer.body_bytes[-1] == 0
    assert (await send(api, [part(large)]))[0] == 400  # read again: `user` is too long


async def test_large_bodies_turn_no_small_one_away(api: Api) -> None:
    large = [part(b'{"prompt": "', more=True), part(b" " * 990_000, more=True)]
    full = [asyncio.create_task(send(api, large)) for _ in range(2)]
    # a thousand bytes of room are left
    rest = asyncio.create_task(send(api, [part(b" " * 19_000, more=True)]))
    await asyncio.sleep(0)
    assert (await send(api, [part(b'{"prompt": "x"%b}' % (b" " * 60_000))]))[0] == 200
    for task in (*full, rest):
        task.cancel()
    await asyncio.gather(*full, rest, return_exceptions=True)


async def test_many_bodies_under_way_give_way_to_others(tokenizer: Tokenizer) -> None:
    """The oldest of whoever has the most ends, once it has had a second; younger ones keep
    newcomers out."""
    limits = make_limits(max_uploads=3, body_timeout_s=30.0)
    api = build_api(ScriptedService(tokenizer), AsyncAdmissionQueue(4, 2), limits)
    loop = asyncio.get_running_loop()

    def upload(source: str) -> asyncio.Task[Any]:
        return asyncio.create_task(send(api, [part(b'{"prompt": ', more=True)], source=source))

    single = upload("single")
    await asyncio.sleep(0)
    first, second = upload("many"), upload("many")
    begun = loop.time()
    await asyncio.sleep(0)
    status, _, answer, _ = await upload("other")
    assert (status, answer["error"]["code"]) == (429, "bodies_full")
    while loop.time() - begun < 1.0:  # noqa: ASYNC110 (the limit's own clock)
        await asyncio.sleep(0.05)
    parts = [part(b'{"prompt": ', more=True), part(b'"x"}')]
    assert (await send(api, parts, source="other"))[0] == 200
    status, _, answer, _ = await first
    assert (status, answer["error"]["code"]) == (408, "request_timeout")
    assert "too slowly" in answer["error"]["message"]
    assert not second.done()
    assert not single.done()
    for task in (single, second):
        task.cancel()
    await asyncio.gather(single, second, return_exceptions=True)


@pytest.mark.parametrize("length", [b"-1", b"abc", b"1_000", "²".encode("latin-1")])
async def test_a_length_that_is_no_number(api: Api, length: bytes) -> None:
    status, _, _, num_read = await send(api, [part(BODY)], [(b"content-length", length)])
    assert (status, num_read) == (400, 0)


async def test_a_body_that_does_not_end_times_out(api: Api) -> None:
    status, headers, answer, _ = await send(api, [part(b'{"pro', more=True)])
    assert (status, headers[b"connection"]) == (408, b"close")
    assert answer["error"]["code"] == "request_timeout"


async def test_a_body_in_many_parts_is_one_body(api: Api) -> None:
    parts = [part(BODY[i : i + 1], more=True) for i in range(len(BODY))]
    assert (await send(api, [*parts, part(b"")]))[0] == 200


async def test_a_client_that_leaves_while_sending_gets_no_answer(api: Api) -> None:
    status, *_ = await send(api, [part(b"{", more=True), {"type": "http.disconnect"}])
    assert status is None
    assert api.service.requests == []


async def test_headers_are_bounded(api: Api) -> None:
    status, _, answer, _ = await send(api, [part(BODY)], [(b"x-filler", b"x" * 1000)] * 40)
    assert (status, answer["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("given", [b"abc-123", b"a", b"A.b:c_d-" + b"9" * 100])
async def test_a_sound_request_id_comes_back(api: Api, given: bytes) -> None:
    for body, wanted in ((BODY, 200), (b"{}", 400)):
        status, headers, answer, _ = await send(api, [part(body)], [(b"x-request-id", given)])
        assert (status, headers[b"x-request-id"]) == (wanted, given)
        assert wanted == 200 or answer["error"]["request_id"] == given.decode()
    assert api.service.requests[0].request_id != given.decode()


@pytest.mark.parametrize("given", [b"", b"a b", b"a\nb", b"x" * 129, b"-a", "é".encode(), b"<script>"])
async def test_any_other_request_id_is_replaced(api: Api, given: bytes) -> None:
    _, headers, _, _ = await send(api, [part(BODY)], [(b"x-request-id", given)])
    assert headers[b"x-request-id"] != given
    assert headers[b"x-request-id"].startswith(b"req-")


async def test_a_refused_body_is_gone_with_its_request(api: Api) -> None:
    """Not only once garbage is collected: large bodies that are refused would fill the memory
    meanwhile."""
    gc.collect()
    before = sum(issubclass(type(one), RequestError) for one in gc.get_objects())
    gc.disable()
    try:
        for body in (b'{"prompt": "x", "user": "%b"}' % (b" " * 900_000), b'{"prompt": "%b"}' % (b"x" * 900_000)):
            for _ in range(5):
                assert (await send(api, [part(body)]))[0] == 400
        left = sum(issubclass(type(one), RequestError) for one in gc.get_objects()) - before
        assert left <= 2, "the last ones, not all ten"
    finally:
        gc.enable()
