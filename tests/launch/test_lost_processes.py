"""What a running server does when a process that it depends on is gone: HAProxy, Ray's GCS, Ray's
raylet."""

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.launch.kept_folder import KeptFolder
from tests.serving.conftest import Server, wait_for
from tests.serving.test_server import body

StartServer = Callable[..., Server]


@pytest.fixture
def started(start: StartServer, small_model: Path) -> Server:
    args = {
        "model": str(small_model),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {"max_num_seqs": 8, "kv_cache_gib": 0.05, "num_threads": 1},
    }
    server = start(args)
    server.wait_ready()
    return server


def haproxy(server: Server) -> list[psutil.Process]:
    return [process for process in server.running(" -f ") if process.name() == "haproxy"]


def serves(server: Server) -> bool:
    try:
        return httpx.post(f"{server.url}/v1/completions", json=body(), timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def folder_of(process: psutil.Process) -> Path:
    command = process.cmdline()
    return Path(command[command.index("-f") + 1]).parents[1]


def wait_for_another(server: Server, before: psutil.Process) -> None:
    wait_for(lambda: serves(server) and before not in haproxy(server), "another HAProxy serves", 60)


@pytest.mark.cluster
def test_haproxy_is_started_again_at_once(started: Server) -> None:
    """Also after its files in the temporary folder were deleted, and where the folder has gone
    while it runs."""
    (first,) = haproxy(started)
    first.kill()
    wait_for_another(started, first)
    # Only of the first: Ray shows equal lines of a few seconds once. A reload may have been under
    # way, with two pids.
    line = re.compile(r"HAProxy \(pid \d+\) has .*: restarting it")
    wait_for(lambda: any(line.search(said) for said in started.lines), "a line says so")
    (second,) = haproxy(started)
    folder = folder_of(second)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.unlink()
    second.kill()
    wait_for_another(started, second)
    (third,) = haproxy(started)
    shutil.rmtree(folder)
    wait_for_another(started, third)
    assert (folder / "additions.json").exists()
    assert started.stop() == (0, [])


@pytest.mark.cluster
def test_a_frozen_haproxy_is_replaced(started: Server) -> None:
    wait_for(lambda: serves(started), "an answer")
    (first,) = haproxy(started)
    first.suspend()
    wait_for_another(started, first)
    line = f"HAProxy (pid {first.pid}) is frozen"
    started.said(line)
    assert not first.is_running()
    assert started.stop() == (0, [])


@pytest.mark.cluster
def test_while_rays_gcs_is_frozen_requests_are_served_and_the_server_is_not_ready(started: Server) -> None:
    (gcs,) = started.running("gcs_server")

    def is_ready() -> bool:
        return httpx.get(f"{started.url}/health/ready", timeout=30).status_code == 200

    gcs.suspend()
    wait_for(lambda: not is_ready(), "not ready", 60)
    assert serves(started)
    gcs.resume()
    wait_for(is_ready, "ready again", 60)
    started.said("Ray's GCS has not answered for")
    assert started.stop() == (0, [])


@pytest.mark.cluster
@pytest.mark.slow
def test_a_proxy_that_cannot_start_ends_the_server(started: Server) -> None:
    (process,) = haproxy(started)
    (folder_of(process) / "haproxy").write_text("#!/bin/sh\nexit 1\n")
    started.send(signal.SIGCONT)
    process.kill()
    assert started.wait_stopped() == (1, [])
    assert "has accepted no connection" in started.lines[-1]


@pytest.mark.cluster
async def test_without_rays_gcs_running_streams_finish_and_the_server_ends(started: Server) -> None:
    server = started
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        first, tokens = asyncio.Event(), 600

        async def stream(number: int) -> list[str]:
            events = []
            request: dict[str, Any] = body(max_tokens=tokens, temperature=1, seed=number, stream=True)
            async with http.stream("POST", "/v1/completions", json=request) as response:
                async for line in response.aiter_lines():
                    if line:
                        first.set()
                        events.append(line.removeprefix("data: "))
            return events

        streams = [asyncio.create_task(stream(number)) for number in range(6)]
        await first.wait()
        server.send(signal.SIGCONT)  # which only notes the processes that there are
        (gcs,) = server.running("gcs_server")
        gcs.kill()

        def is_refused() -> bool:
            answer = httpx.get(f"{server.url}/health/ready", timeout=30)
            return answer.status_code == 503 and "shutting down" in answer.text

        await asyncio.to_thread(wait_for, is_refused, "not ready")
        for events in await asyncio.gather(*streams):
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    status, left = await asyncio.to_thread(server.wait_stopped)
    assert (status, left) == (1, [])
    (line,) = [line for line in server.lines if "GCS" in line]
    assert f"Ray's GCS (pid {gcs.pid}) has ended (signal 9)" in line


@pytest.mark.cluster
def test_without_rays_raylet_the_server_ends(started: Server) -> None:
    started.send(signal.SIGCONT)
    (raylet,) = started.running("/raylet ")
    raylet.kill()
    assert started.wait_stopped() == (1, [])
    (line,) = [line for line in started.lines if "Ray's raylet" in line]
    assert f"Ray's raylet (pid {raylet.pid}) has ended (signal 9)" in line


def test_deleted_files_are_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "scratch"
    folder.mkdir()
    program, key, unfinished = folder / "program", folder / "key", folder / "key.new"
    program.write_text("one")
    program.chmod(0o700)
    unfinished.write_text("half")
    kept = KeptFolder(folder, said.append)
    kept.look()
    key.write_text("secret")
    key.chmod(0o600)
    program.write_text("two")
    kept.look()
    for path in (program, key, unfinished):
        path.unlink()
    folder.rmdir()
    kept.look()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"program": "two", "key": "secret"}
    assert [path.stat().st_mode & 0o777 for path in (program, key, folder)] == [0o700, 0o600, 0o700]
    kept.look()
    assert said == [f"2 of this server's files in {folder} were deleted and have been rewritten"]
