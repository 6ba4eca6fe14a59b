"""A server in operation: knobs that change while it runs, an update under load, replicas that come
and go, its end.

One server, in this order.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.launch.ports import free_port
from tests.cli.conftest import CONTEXT
from tests.serving.conftest import Server, launch, wait_for, write_config
from tests.serving.traffic import WORKERS, ask, body, connect, replicas, traffic

pytestmark = pytest.mark.cluster

SLOTS = 8
DRAIN_TIMEOUT_S = 1.0


@dataclass
class Operated:
    """A server and the config file that it was started with."""

    server: Server
    config: Path

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> str:
        """Change the application in the config file, have the file read again; what the server says
        in the end."""
        config = yaml.safe_load(self.config.read_text())
        change(config["applications"][0])
        self.config.write_text(yaml.safe_dump(config))
        said = len(self.server.lines)
        self.server.process.send_signal(signal.SIGUSR1)

        def answer() -> str | None:
            lines = self.server.lines[said:]
            return next((line for line in lines if line.endswith(("nothing has changed", "deployed"))), None)

        wait_for(lambda: answer() is not None, "the server says what it did", timeout_s=240)
        return str(answer())


@pytest.fixture(scope="module")
def operated(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    args = {
        "model": str(tiny_folder),
        "served_model_name": "tiny",
        "device": "cpu",
        "engine": {"max_num_seqs": SLOTS, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05, "num_threads": 1},
        "ingress": {"drain_timeout_s": DRAIN_TIMEOUT_S},
    }
    port = free_port()
    config = write_config(tmp_path_factory.mktemp("operated"), args, port)
    environment = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    server = Server(launch(config, environment), f"http://127.0.0.1:{port}")
    try:
        server.wait_ready()
        yield Operated(server, config)
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def most_running(server: Server, samples: int = 20) -> float:
    """The highest number of running sequences in so many looks."""
    return max(server.metrics()["serve_app_requests_running"] for _ in range(samples))


async def test_knobs_change_under_load_without_losing_a_token(operated: Operated) -> None:
    async with traffic(operated.server) as seen:
        assert await asyncio.to_thread(most_running, operated.server) > 2

        def two_slots(application: dict[str, Any]) -> None:
            knobs = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "waiting_served_ratio": 1.0}
            application["deployments"] = [{"name": "EngineReplica", "user_config": knobs}]

        before = replicas(operated.server)
        assert (await asyncio.to_thread(operated.deploy, two_slots)).endswith("deployed")
        done = seen.done
        await asyncio.to_thread(wait_for, lambda: seen.done > done + WORKERS, "streams go on")
        assert 0 < await asyncio.to_thread(most_running, operated.server) <= 2
        assert replicas(operated.server) == before
    assert seen.wrong == []
    assert seen.done > WORKERS


def test_a_wrong_knob_is_named_and_changes_nothing(operated: Operated) -> None:
    def wrong(application: dict[str, Any]) -> None:
        application["deployments"] = [{"name": "EngineReplica", "user_config": {"max_num_seq": 2}}]

    said = operated.deploy(wrong)
    assert "`max_num_seq` cannot change in a running engine (did you mean `max_num_seqs`?)" in said
    assert httpx.post(f"{operated.server.url}/v1/completions", json=body(0), timeout=60).status_code == 200


async def test_another_model_length_takes_over_under_load(operated: Operated) -> None:
    """Replicas of another revision cannot continue the old one's streams, which end where they
    began.

    What waits at the old ingress when its last engine leaves is served by the new engines.
    """
    server, length = operated.server, CONTEXT - 1

    def shorter(application: dict[str, Any]) -> None:
        application["args"]["engine"]["max_model_len"] = length
        application["deployments"] = []

    before = replicas(server)
    async with connect(server) as http, traffic(server) as seen:
        stream = asyncio.create_task(ask(http, body(WORKERS, 1500)))
        assert (await asyncio.to_thread(operated.deploy, shorter)).endswith("deployed")
        _, events = await stream
        assert events[-1] == "[DONE]"
        done = seen.done
        await asyncio.to_thread(wait_for, lambda: seen.done > done + WORKERS, "streams go on")
        assert replicas(server).isdisjoint(before)
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == length
    assert seen.wrong == []


async def test_an_update_and_replicas_that_come_and_go_cost_no_request(operated: Operated) -> None:
    """New replicas, ingress and engine, take over while streams run and come. From then on the load
    decides how many.

    One test because each of the three follows from what the one before has left running.
    """
    server = operated.server
    before = replicas(server)
    async with connect(server) as http, traffic(server) as seen:

        def autoscaled(application: dict[str, Any]) -> None:
            limits = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 0.5}
            application["args"]["autoscaling"] = limits
            application["deployments"] = []

        assert (await asyncio.to_thread(operated.deploy, autoscaled)).endswith("deployed")
        done = seen.done
        await asyncio.to_thread(wait_for, lambda: seen.done > done + WORKERS, "streams go on")
        # The short ones alone do not keep an engine busy where the client gets little of the
        # machine's time.
        streams = [asyncio.create_task(ask(http, body(number, 3000))) for number in range(2 * SLOTS)]
        await asyncio.to_thread(wait_for, lambda: len(replicas(server)) == 2, "a second replica", timeout_s=90)
        assert {events[-1] for _, events in await asyncio.gather(*streams)} == {"[DONE]"}
        assert replicas(server).isdisjoint(before)
        seen.workers = 1
        await asyncio.to_thread(wait_for, lambda: len(replicas(server)) == 1, "one replica is left", timeout_s=90)
        done = seen.done
        await asyncio.to_thread(wait_for, lambda: seen.done > done, "the stream goes on")
    assert seen.wrong == []


async def test_sigterm_lets_short_streams_end_and_tells_the_others(operated: Operated) -> None:
    """More and longer streams than the time for draining allows; new requests are refused by type,
    not by HAProxy."""
    server = operated.server
    async with connect(server) as http:
        expected = (await ask(http, body(0)))[0]
        first = asyncio.Event()

        async def stream(number: int, max_tokens: int) -> tuple[int, str]:
            """The status and the last event (or the whole body)."""
            last = ""
            async with http.stream("POST", "/v1/completions", json=body(number, max_tokens)) as response:
                async for line in response.aiter_lines():
                    if line:
                        first.set()
                        last = line.removeprefix("data: ")
                return response.status_code, last

        short = asyncio.create_task(ask(http, body(0)))
        tasks = [asyncio.create_task(stream(1 + number % 7, 450 if number < 10 else 4000)) for number in range(100)]
        await first.wait()
        await asyncio.to_thread(
            wait_for, lambda: server.metrics()["serve_app_ingress_queue_depth"] > 50, "most of them wait in the queue"
        )
        server.send(signal.SIGTERM)

        ready = f"{server.url}/health/ready"
        await asyncio.to_thread(wait_for, lambda: httpx.get(ready).status_code == 503, "not ready any more")
        answer = await http.post("/v1/completions", json=body(0))
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert "shutting down" in answer.json()["error"]["message"]

        assert (await short)[0] == expected
        ends = await asyncio.gather(*tasks)
    complete = [end for end in ends if end == (200, "[DONE]")]
    told = [json.loads(last)["error"] for _, last in ends if last != "[DONE]"]
    messages = {error["message"] for error in told}
    assert {"the server has shut down"} <= messages <= {"the server has shut down", "the server is shutting down"}
    assert complete
    assert len(complete) + len(told) == 100
    assert {status for status, _ in ends} == {200, 503}
    assert server.wait_stopped() == (0, [])
    assert not [line for line in server.lines if "failed to shut down" in line]
