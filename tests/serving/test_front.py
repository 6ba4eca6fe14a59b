"""What comes before Ray's handling of a request: one sound id, health past whatever waits, one
start at a time."""

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.serving.front import Front

Headers = list[tuple[bytes, bytes]]


async def call(path: str, headers: Headers) -> tuple[Headers, Headers]:
    """(headers that Ray gets, headers of the response); an application of ours answers with none of
    its own."""
    seen: Headers = []
    sent: list[Any] = []

    async def ray(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    await Front(ray)(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    return seen, [pair for message in sent for pair in message["headers"]]


@pytest.mark.parametrize("given", [b"x" * 10_000, b'a"b', b"a\tb", "é".encode(), b""])
async def test_ray_never_sees_an_unsound_id(given: bytes) -> None:
    """It would write it into the response as it is, whatever body and log say."""
    seen, _ = await call("/v1/models", [(b"x-request-id", given)])
    (request_id,) = [value for name, value in seen if name == b"x-request-id"]
    assert request_id.startswith(b"req-")


async def test_a_sound_id_is_kept_once() -> None:
    seen, _ = await call("/v1/models", [(b"x-request-id", b"mine"), (b"x-request-id", b"other"), (b"a", b"b")])
    assert seen == [(b"a", b"b"), (b"x-request-id", b"mine")]


async def test_health_does_not_come_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    monkeypatch.setattr(Front, "application", staticmethod(application))
    monkeypatch.setattr(Front, "loop", asyncio.get_running_loop())
    assert await call("/health/ready", [(b"x-request-id", b"mine")]) == ([], [(b"x-request-id", b"mine")])


def answering(status: int, body: str) -> Any:
    async def ray(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})

    return ray


async def ask(app: Any, path: str, client: str = "127.0.0.1") -> httpx.Response:
    transport = httpx.ASGITransport(Front(app), client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return await http.get(path)


NO_ROUTE = "Path '/v1/completions' not found. Ping http://.../-/routes for available routes."


@pytest.mark.parametrize(
    ("status", "said", "meant", "code"),
    [(404, NO_ROUTE, 503, "unavailable"), (429, "Request dropped due to backpressure (a=1, b=2)", 429, "flood")],
)
async def test_rays_refusals_have_the_apis_shape(status: int, said: str, meant: int, code: str) -> None:
    answer = await ask(answering(status, said), "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (meant, code)
    assert int(answer.headers["retry-after"]) >= 1
    anthropic = await ask(answering(status, said), "/v1/messages")
    assert (anthropic.status_code, anthropic.json()["type"]) == (meant, "error")


@pytest.mark.parametrize("status", [200, 404, 429])
async def test_what_another_application_says_in_plain_text_is_its_own(status: int) -> None:
    answer = await ask(answering(status, "no such cat"), "/cats")
    assert (answer.status_code, answer.text) == (status, "no such cat")


@pytest.mark.parametrize("path", ["/-/routes", "/%2d/routes", "/%2d/healthz", "/-/healthz/", "/-/"])
async def test_rays_routes_are_closed(path: str) -> None:
    answer = await ask(answering(200, "success"), path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 404), ("", 404)])
async def test_rays_health_is_for_this_machine(client: str, status: int) -> None:
    assert (await ask(answering(200, "success"), "/-/healthz", client)).status_code == status


async def test_requests_whose_clients_have_left_are_not_begun() -> None:
    """They wait for their turn behind others, and health is answered meanwhile."""
    begun: list[str] = []

    async def ray(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        assert (await receive())["type"] == "http.request"

    front, gone = Front(ray), asyncio.Event()

    async def request(path: str, *, leaves: bool) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"} if leaves and gone.is_set() else {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await front({"type": "http", "path": path, "headers": []}, receive, send)

    crowd = [asyncio.create_task(request(f"/{number}", leaves=number > 0)) for number in range(500)]
    await asyncio.sleep(0)
    gone.set()
    await request("/health/ready", leaves=False)
    assert len(begun) < 10
    await request("/honest", leaves=False)
    await asyncio.gather(*crowd)
    assert begun == ["/health/ready", "/0", "/honest"] or begun == ["/0", "/health/ready", "/honest"]
