"""Connections that say nothing, or hardly anything: whoever speaks is served meanwhile, and health
is told at once."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.chaos.traffic import open_narrow_session
from tests.serving.conftest import Server, wait_for
from tests.serving.test_server import NO_EOS, body

pytestmark = pytest.mark.cluster

# More than Ray runs and queues, so that without bounds no other client gets a turn.
CONNECTIONS = 1800
ELSEWHERE = "127.0.0.2"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 40000\r\n\r\n"
)
OPENINGS = {
    "nothing": b"",
    "half a header": HEAD[:30],
    "headers only": HEAD,
    "33 KB of 40": HEAD + b'{"prompt": "' + b"x" * 33_000,
}


@contextlib.asynccontextmanager
async def crowd(server: Server, opening: bytes, source: str) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Connections that have sent `opening` and send nothing more while the block runs."""
    host, port = server.url.removeprefix("http://").split(":")
    gate = asyncio.Semaphore(200)

    async def connect() -> asyncio.StreamWriter:
        async with gate:
            _, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            writer.write(opening)
            await writer.drain()
            return writer

    attempts = await asyncio.gather(*(connect() for _ in range(CONNECTIONS)), return_exceptions=True)
    writers = [attempt for attempt in attempts if isinstance(attempt, asyncio.StreamWriter)]
    try:
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.fixture
def fast_path_server(server: Server) -> Server:
    if not server.running("haproxy"):
        pytest.skip("Ray's default path has no bound on connections, and says so")
    return server


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
async def test_whoever_speaks_is_served_meanwhile(fast_path_server: Server, opening: bytes) -> None:
    """Long before the silent ones' time is over (10 s), which is when they would let go of what
    they hold."""
    server = fast_path_server
    async with crowd(server, opening, ELSEWHERE), httpx.AsyncClient(timeout=5) as http:
        for _ in range(3):
            health = [await http.get(f"{server.url}/health/{which}") for which in ("ready", "live")]
            assert [answer.status_code for answer in health] == [200, 200]
            small = await http.post(f"{server.url}/v1/completions", json=body())
            assert small.status_code == 200, small.text


async def test_a_large_body_finds_room_among_slow_ones(fast_path_server: Server) -> None:
    """A refusal says when to come back, and who comes back displaces one that has been slow
    since."""
    server = fast_path_server
    content = b" " * 100_000 + json.dumps(body()).encode()
    headers = {"content-type": "application/json"}
    statuses: list[int] = []
    async with crowd(server, OPENINGS["33 KB of 40"], ELSEWHERE), httpx.AsyncClient(timeout=5) as http:
        while statuses.count(200) < 3:
            answer = await http.post(f"{server.url}/v1/completions", content=content, headers=headers)
            statuses.append(answer.status_code)
            if answer.status_code != 200:
                await asyncio.sleep(float(answer.headers["retry-after"]))
    assert statuses.count(429) <= 2
    assert set(statuses) <= {200, 429}


# 20 MB, more than fits into the buffers on the way.
UNREAD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 1500,
    "n": 8,
    "temperature": 1,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
    **NO_EOS,
}


async def test_readers_of_nothing_leave_their_slots_to_others(fast_path_server: Server) -> None:
    """Four of them would take all slots twice over."""
    server = fast_path_server
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            session = await stack.enter_async_context(open_narrow_session())
            async with asyncio.timeout(30):  # its first token comes once it has a slot
                await stack.enter_async_context(session.post(f"{server.url}/v1/chat/completions", json=UNREAD))
        async with httpx.AsyncClient(timeout=30) as http:
            answer = await http.post(f"{server.url}/v1/completions", json=body())
        assert answer.status_code == 200
    await asyncio.to_thread(wait_for, lambda: server.metrics()["serve_app_requests_active"] == 0, "their end", 60)


@pytest.mark.slow
async def test_whoever_reads_nothing_for_a_minute_gives_its_place_back(fast_path_server: Server) -> None:
    """Long before the request's own time is over, which is ten minutes."""
    server = fast_path_server
    url = f"{server.url}/v1/chat/completions"
    async with open_narrow_session() as session, session.post(url, json=UNREAD) as stream:
        assert stream.status == 200, await stream.text()
        before = server.metrics().get('serve_app_requests_total{outcome="cancelled"}', 0)
        await asyncio.to_thread(wait_for, lambda: server.metrics()["serve_app_requests_active"] == 0, "its end", 200)
    assert server.metrics()['serve_app_requests_total{outcome="cancelled"}'] == before + 1


@pytest.mark.slow
async def test_an_address_has_only_so_many_unfinished_requests(start: Callable[..., Server], tiny_folder: Path) -> None:
    """Those that are beyond it are closed; requests that are complete are not counted among
    them."""
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "ingress": {"max_unfinished_per_source": 4},
    }
    server = start(args)
    server.wait_ready()
    url = f"{server.url}/v1/completions"
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for number in range(8):
            # What is drawn repeats nothing to be drafted: no stream ends before the connections are
            # counted.
            request = body(max_tokens=4000, temperature=1, seed=number, stream=True)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            streams.append(await stack.enter_async_context(http.stream("POST", url, json=request)))
        assert [stream.status_code for stream in streams] == [200] * 8
        assert 0 < await asyncio.to_thread(count_open, server) <= 4


def count_open(server: Server) -> int:
    """Of twelve connections that say nothing, how many the server leaves open."""
    host, port = server.url.removeprefix("http://").split(":")
    connections, left_open = [], 0
    for _ in range(12):
        with contextlib.suppress(ConnectionError):
            connections.append(socket.create_connection((host, int(port))))
    for connection in connections:
        connection.settimeout(0.5)
        with connection, contextlib.suppress(ConnectionError):
            try:
                connection.recv(1)
            except TimeoutError:
                left_open += 1
    return left_open


async def test_haproxy_keeps_few_connections_after_many_health_checks(fast_path_server: Server) -> None:
    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        url = f"{fast_path_server.url}/health/ready"
        answers = await asyncio.gather(*(client.get(url) for _ in range(300)))
    assert {answer.status_code for answer in answers} == {200}
    (ingress,) = fast_path_server.running("::Ingress") or fast_path_server.running("Ingress")

    def kept() -> int:
        proxies = [process for process in fast_path_server.running("haproxy")]
        ends = {end.laddr for proxy in proxies for end in proxy.net_connections("tcp") if end.raddr}
        return sum(end.raddr in ends for end in ingress.net_connections("tcp") if end.raddr)

    await asyncio.to_thread(wait_for, lambda: 0 < kept() <= 16, "few connections are kept")
