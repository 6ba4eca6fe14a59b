"""Who may come in: on every route of the application, by every kind of key, and what a key then may
do."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.access import Access
from serve_app.console.routes import Sources, add_console
from serve_app.tenants.keys import KeyRing, hash_key
from serve_app.tenants.tenant import Tenant
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService

PUBLIC = {"/", "/docs", "/console/{name}", "/health", "/health/live", "/health/ready", "/ping"}
TENANTS = {
    "Key-Team": Tenant(name="team", weight=2, priority=[0, 5]),
    "Key-Admin": Tenant(name="boss", admin=True),
    "Key-Old": Tenant(name="old", expires=datetime.now(UTC) - timedelta(seconds=1)),
    "Key-Other": Tenant(name="other", models=["another model"]),
    "Key-One": Tenant(name="one", prefix_group="g"),
    "Key-Two": Tenant(name="two", prefix_group="g"),
}
WRONG = {
    "none": {},
    "unknown": {"authorization": "Bearer somebody"},
    "other case": {"authorization": "Bearer key-team"},
    "expired": {"authorization": "Bearer Key-Old"},
    "empty": {"authorization": "Bearer "},
    "basic": {"authorization": "Basic Key-Team"},
    "its hash": {"x-api-key": hash_key("Key-Team")},
}


@dataclass
class Guarded:
    app: Any
    http: httpx.AsyncClient
    service: ScriptedService
    queue: AsyncAdmissionQueue

    async def ask(self, key: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json={"prompt": "x", "max_tokens": 2, **fields}, headers=headers)


def guarded(tokenizer: Tokenizer, **how: Any) -> Guarded:
    service, queue = ScriptedService(tokenizer), AsyncAdmissionQueue(4, 8)
    ring = KeyRing({hash_key(key): tenant for key, tenant in TENANTS.items()})
    share = how.pop("share_prefixes", False)
    access = Access(lambda: ring, internal_key="Key-Internal", **how)
    app = create_app(service, queue, make_limits(), Recorder(), access=access, share_prefixes=share)

    async def recordings(_: float) -> list[bytes]:
        return []

    add_console(app, Sources(recordings, dict))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return Guarded(app, http, service, queue)


@pytest.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Guarded]:
    built = guarded(tokenizer)
    async with built.http:
        yield built


def routes(app: Any) -> list[tuple[str, str]]:
    found = [(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]
    others = [("GET", route.path) for route in app.routes if not isinstance(route, APIRoute)]
    assert others == [("GET", "/openapi.json")]
    return found + others


def filled(path: str) -> str:
    return re.sub(r"\{name(:path)?\}", "api.js", path)


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
async def test_every_route_but_the_public_ones_wants_a_right_key(server: Guarded, headers: dict[str, str]) -> None:
    for method, path in [*routes(server.app), ("POST", "/v1/no-such-route"), ("GET", "/metrics/targets")]:
        answer = await server.http.request(method, filled(path), headers=headers)
        if path in PUBLIC:
            assert answer.status_code == 200, path
            continue
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        error = answer.json()["error"]
        wanted = ("authentication_error", None) if "messages" in path else ("invalid_request_error", "invalid_api_key")
        assert (error["type"], error.get("code")) == wanted
        assert "Key" not in answer.text
        preflight = await server.http.options(filled(path), headers=headers)
        assert preflight.status_code != 401
    assert server.service.requests == []


async def test_metrics_and_debug_want_an_admins_key(server: Guarded) -> None:
    admin_only = [path for method, path in routes(server.app) if path.startswith(("/metrics", "/debug"))]
    assert {"/metrics", "/debug/timeline"} <= set(admin_only)
    for path in [*admin_only, "/debug/replicas", "/metrics/targets", "/debug"]:
        for key, status in (("Key-Team", 403), ("Key-Internal", 403), ("Key-Admin", None)):
            answer = await server.http.get(path, headers={"x-api-key": key})
            assert answer.status_code == status or status is None, (path, key)
            assert status is not None or answer.status_code in (200, 404)
    refused = await server.http.get("/metrics", headers={"x-api-key": "Key-Team"})
    assert refused.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer Key-Team"},
        {"authorization": "bearer  Key-Team"},
        {"authorization": "Key-Team"},
        {"x-api-key": "Key-Team"},
        {"x-api-key": "Key-Internal"},
    ],
)
async def test_a_key_comes_in_the_ways_of_openai_and_anthropic(server: Guarded, headers: dict[str, str]) -> None:
    answer = await server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert (await server.http.get("/v1/models", headers=headers)).json()["data"][0]["id"] == "scripted"


TWO_KEYS = [
    ([("authorization", "Bearer Key-Team"), ("authorization", "Bearer Key-Admin")], 401),
    ([("authorization", "Bearer Key-Admin"), ("authorization", "Bearer Key-Team")], 401),
    ([("authorization", "Bearer Key-Team, Bearer Key-Admin")], 401),
    ([("x-api-key", "Key-Team"), ("x-api-key", "Key-Admin")], 401),
    ([("authorization", "Bearer somebody"), ("x-api-key", "Key-Admin")], 401),
    ([("authorization", "Bearer "), ("x-api-key", "Key-Admin")], 401),
    ([("authorization", "Bearer Key-Team"), ("x-api-key", "Key-Admin")], 403),
    ([("authorization", "Bearer Key-Admin"), ("authorization", "Bearer Key-Admin")], 200),
]


@pytest.mark.parametrize(("headers", "status"), TWO_KEYS)
async def test_of_two_keys_none_is_chosen_by_chance(
    server: Guarded, headers: list[tuple[str, str]], status: int
) -> None:
    assert (await server.http.get("/metrics", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "key", ["K\u00e9y-Team", "Key-Team\u00ff", "\u212aey-Team", "\x00Key-Team", "Key-Team\x00", "*"]
)
async def test_odd_characters_make_no_key(server: Guarded, key: str) -> None:
    for headers in ({"authorization": b"Bearer " + key.encode()}, {"x-api-key": key.encode()}):
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["//v1/models", "/V1/models", "/%2e/v1/models", "/v1/%2e%2e/v1/models", "/v1/models/"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "TRACE"])
async def test_no_spelling_of_a_path_or_method_needs_no_key(server: Guarded, method: str, path: str) -> None:
    assert (await server.http.request(method, f"http://test{path}")).status_code == 401


PUBLIC_TRICKS = ("/console/%2e%2e/metrics", "/console/..%2fmetrics", "/console//metrics", "/health/live/%2e%2e/metrics")
ADMIN_TRICKS = ("//metrics", "/Metrics", "/metrics/", "/%6detrics", "/metrics%2ftargets", "/metrics;", "/metrics%00")


async def test_no_spelling_of_a_path_shows_metrics(server: Guarded) -> None:
    for path in (*PUBLIC_TRICKS, *ADMIN_TRICKS, "/debug//timeline", "/v1/../debug/timeline"):
        for key in ("", "Key-Team"):
            for method in ("GET", "HEAD", "OPTIONS"):
                answer = await server.http.request(method, f"http://test{path}", headers={"x-api-key": key})
                told = (method, path, answer.status_code)
                assert answer.status_code in (307, 401, 403, 404, 405), told
                assert "serve_app_up" not in answer.text, told


async def test_options_do_nothing_on_any_route(server: Guarded) -> None:
    for _, path in routes(server.app):
        answer = await server.http.request("OPTIONS", filled(path), json={"prompt": "x"})
        assert answer.status_code == 405, path
    assert server.service.requests == []


async def test_a_request_id_brings_no_header_of_its_own(server: Guarded) -> None:
    for name in ("a\r\nset-cookie: b", "\u00e9", "x" * 200, ""):
        headers = {"x-request-id": name.encode(), "x-api-key": "Key-Team"}
        answer = await server.http.get("/v1/models", headers=headers)
        assert answer.headers["x-request-id"].startswith("req-")
        assert "set-cookie" not in answer.headers


async def test_a_body_is_not_read_before_the_key(server: Guarded) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 2**16
            await asyncio.sleep(0)

    answer = await server.http.post("/v1/completions", content=endless())
    assert (answer.status_code, answer.headers["connection"]) == (401, "close")


async def test_who_sends_no_key_may_be_served_and_a_wrong_key_is_wrong_all_the_same(tokenizer: Tokenizer) -> None:
    server = guarded(tokenizer, allow_anonymous=True)
    async with server.http:
        assert (await server.ask(None)).status_code == 200
        assert (await server.ask("Key-Team")).status_code == 200
        assert (await server.ask("somebody")).status_code == 401
        assert (await server.http.get("/metrics")).status_code == 401


async def test_a_model_that_is_not_for_a_key_is_not_there(server: Guarded) -> None:
    headers = {"x-api-key": "Key-Other"}
    assert (await server.http.get("/v1/models", headers=headers)).json()["data"] == []
    answers = [
        await server.ask("Key-Other"),
        await server.ask("Key-Other", model="scripted"),
        await server.http.get("/v1/models/scripted", headers=headers),
        await server.http.post("/tokenize", json={"prompt": "x"}, headers=headers),
        await server.http.post("/detokenize", json={"tokens": [1]}, headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [404] * 5
    assert {answer.json()["error"]["code"] for answer in answers} == {"model_not_found"}
    assert server.service.requests == []


@pytest.mark.parametrize(
    ("key", "priority", "status"), [("Key-Team", 5, 200), ("Key-Team", 6, 403), ("Key-One", -1, 403)]
)
async def test_a_priority_is_bounded_by_the_key(server: Guarded, key: str, priority: int, status: int) -> None:
    answer = await server.ask(key, priority=priority)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["param"] == "priority"
        assert re.search(r"from 0 to \d+, got -?\d$", answer.json()["error"]["message"])


async def test_prefixes_are_shared_within_a_group_alone(server: Guarded) -> None:
    async def salt(key: str, **fields: Any) -> str:
        assert (await server.ask(key, **fields)).status_code == 200
        return server.service.requests[-1].cache_salt

    team, boss, one, two = [await salt(key) for key in ("Key-Team", "Key-Admin", "Key-One", "Key-Two")]
    assert len({team, boss, one, ""}) == 4
    assert one == two
    assert await salt("Key-Team", cache_salt="mine") not in (team, "mine")


async def test_prefixes_are_shared_by_all_where_the_operator_says_so(tokenizer: Tokenizer) -> None:
    server = guarded(tokenizer, share_prefixes=True)
    async with server.http:
        for key in ("Key-Team", "Key-One"):
            assert (await server.ask(key, cache_salt="s")).status_code == 200
    assert [request.cache_salt for request in server.service.requests] == ["s", "s"]


async def test_keys_take_turns_by_their_weights(server: Guarded) -> None:
    """A queue full of others' requests takes those of a key with less in it; a user is a share of
    its key."""
    server.service.hold = asyncio.Event()
    posts = [asyncio.create_task(server.ask("Key-One", user=f"user {i}", seed=i)) for i in range(12)]
    while (server.service.running, server.queue.queued) != (4, 8):  # noqa: ASYNC110
        await asyncio.sleep(0)
    posts += [asyncio.create_task(server.ask("Key-Team", seed=i)) for i in range(12)]
    refused = 0
    while refused < 12:
        await asyncio.wait([post for post in posts if not post.done()], return_when=asyncio.FIRST_COMPLETED)
        refused = sum(post.done() for post in posts)
    waiting = [len([post for post in part if not post.done()]) for part in (posts[:12], posts[12:])]
    assert waiting == [4 + 3, 5], "twice the weight may have twice as many waiting, to a request"
    server.service.hold.set()
    answers = [answer.status_code for answer in await asyncio.gather(*posts)]
    assert (answers.count(200), answers.count(429)) == (12, 12)
