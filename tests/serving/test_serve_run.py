"""`serve run deploy/config.yaml`, without the launcher: Ray's own command serves the same application."""

import signal
from collections.abc import Callable

import httpx
import pytest
import yaml

from tests.serving.conftest import REPOSITORY, Server, wait_for

# A cluster of its own, whatever else runs on the machine, and on loopback.
ENVIRONMENT = {"RAY_ADDRESS": "local", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.cluster
def test_it_answers_says_what_it_lacks_and_ends(start: Callable[..., Server]) -> None:
    args = yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())["applications"][0]["args"]
    server = start(args, ENVIRONMENT, command=("serve", "run"))

    def is_ready() -> bool:
        assert server.process.poll() is None, server.lines
        try:
            return httpx.get(f"{server.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, "the server is ready", timeout_s=150)
    body = {"messages": [{"role": "user", "content": "Name the capital of France."}], "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 16}, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    wait_for(lambda: any("this server runs on Ray's default path" in line for line in server.lines), "it says so")
    assert server.stop(signal.SIGINT) == (0, [])
    assert not [line for line in server.lines if "Traceback" in line]
