"""What stands before Ray's handling of a request: one sound id, and health past whatever waits."""

import asyncio
from typing import Any

import pytest

from serve_app.serving.front import Front

Headers = list[tuple[bytes, bytes]]


async def call(path: str, headers: Headers) -> tuple[Headers, Headers]:
    """(headers that Ray gets, headers of the response); an application of ours answers with none of its own."""
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
