"""`serve run deploy/config.yaml`, without the launcher: Ray's own command serves the same
application."""

import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from tests.serving.conftest import REPOSITORY, Server, wait_for
from tests.serving.test_server import body

# A cluster of its own, whatever else runs on the machine, and on loopback.
ENVIRONMENT = {"RAY_ADDRESS": "local", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def ready(server: Server) -> bool:
    assert server.process.poll() is None, server.lines
    try:
        return httpx.get(f"{server.url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.cluster
def test_it_answers_says_what_it_lacks_and_ends(start: Callable[..., Server]) -> None:
    args = yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())["applications"][0]["args"]
    server = start(args, ENVIRONMENT, command=("serve", "run"))

    wait_for(lambda: ready(server), "the server is ready", timeout_s=150)
    body = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 16}, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    server.said("this server runs on Ray's default path")
    assert server.stop(signal.SIGINT) == (0, [])
    assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_without_waiting_for_a_frozen_engine(
    start: Callable[..., Server], tiny_folder: Path
) -> None:
    server = start(
        {"model": str(tiny_folder), "served_model_name": "tiny", "device": "cpu"}, ENVIRONMENT, command=("serve", "run")
    )
    wait_for(lambda: ready(server), "the server is ready", timeout_s=150)
    family = server.descendants()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(max_tokens=4000, temperature=1, stream=True), timeout=60
    ) as response:
        next(response.iter_lines())
        for process in server.running("EngineReplica"):
            process.suspend()  # so that the drain would take its whole time

        server.send(signal.SIGINT)
        server.said("shutting down")
        server.send(signal.SIGINT)
        wait_for(lambda: server.process.poll() is not None, "it ends", timeout_s=60)
    # Ray's agents look for their parent now and then.
    _, left = psutil.wait_procs(family, timeout=90)
    assert left == []
