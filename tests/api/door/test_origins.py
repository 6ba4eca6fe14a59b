"""What a page in a browser may not do: use a server that its visitor reaches, or read what it
says."""

from typing import Any

import httpx
import pytest

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.api.door.origins import Origins
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

HOSTS = ("127.0.0.1", "localhost", "[::1]")
FRONT_END = "https://chat.example.org"


def client(tokenizer: Tokenizer, hosts: Any = HOSTS, origins: tuple[str, ...] = ()) -> httpx.AsyncClient:
    access = Access(origins=Origins(hosts, origins))
    app = create_app(
        ScriptedService(tokenizer),
        AsyncAdmissionQueue(4, 4),
        make_limits(),
        Recorder(),
        access=access,
        cors_origins=origins,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


async def status(http: httpx.AsyncClient, path: str = "/v1/models", **headers: str) -> tuple[int, str | None]:
    answer = await http.get(path, headers=headers)
    return answer.status_code, answer.json()["error"]["code"] if answer.status_code >= 400 else None


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "LOCALHOST:8000", "localhost", "[::1]:8000"])
async def test_its_own_names_are_answered(tokenizer: Tokenizer, host: str) -> None:
    async with client(tokenizer) as http:
        assert await status(http, host=host) == (200, None)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost:x", ""])
async def test_a_name_that_was_made_to_lead_here_is_not(tokenizer: Tokenizer, host: str) -> None:
    async with client(tokenizer) as http:
        assert await status(http, host=host) == (403, "host_not_allowed")
        assert await status(http, "/metrics", host=host) == (403, "host_not_allowed")
        assert await status(http, "/health/ready", host=host) == (200, None), "probes call by any name"
    async with client(tokenizer, hosts=None) as http:
        assert (await status(http, host=host))[0] == 200


ORIGINS = [
    ("http://127.0.0.1:8000", 200),
    ("https://127.0.0.1:8000", 200),
    ("http://127.0.0.1:8001", 403),
    ("http://evil.example", 403),
    ("null", 403),
    ("", 403),
    (FRONT_END, 403),
]


@pytest.mark.parametrize(("origin", "wanted"), ORIGINS)
async def test_only_its_own_pages_may_send(tokenizer: Tokenizer, origin: str, wanted: int) -> None:
    async with client(tokenizer) as http:
        assert await status(http, origin=origin) == (wanted, "origin_not_allowed" if wanted == 403 else None)


async def test_a_front_end_that_is_named_may_send_and_read(tokenizer: Tokenizer) -> None:
    async with client(tokenizer, origins=(FRONT_END,)) as http:
        asks = {"origin": FRONT_END, "access-control-request-method": "POST"}
        preflight = await http.options(
            "/v1/completions", headers={**asks, "access-control-request-headers": "authorization,content-type"}
        )
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, FRONT_END)
        answer = await http.get("/v1/models", headers={"origin": FRONT_END})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, FRONT_END)
        other = await http.get("/v1/models", headers={"origin": "http://evil.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)


BODY = b'{"prompt": "x", "max_tokens": 1}'


@pytest.mark.parametrize("sign", [{"origin": "http://127.0.0.1:8000"}, {"sec-fetch-site": "cross-site"}])
async def test_a_browser_has_to_name_the_bodys_type(tokenizer: Tokenizer, sign: dict[str, str]) -> None:
    """A page may send a body without a type anywhere, unasked; `application/json` makes the browser
    ask first."""
    async with client(tokenizer) as http:
        assert (await http.post("/v1/completions", content=BODY)).status_code == 200
        assert (await http.post("/v1/completions", content=BODY, headers=sign)).status_code == 415
        typed = sign | {"content-type": "application/json"}
        assert (await http.post("/v1/completions", content=BODY, headers=typed)).status_code == 200
