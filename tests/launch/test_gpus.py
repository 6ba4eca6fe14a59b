"""GPUs that are not there: refused in a line, or waited for in words. Ray is told what it has."""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.conftest import Server, wait_for

pytestmark = pytest.mark.cluster

StartServer = Callable[..., Server]


def test_without_any_gpu_it_is_refused_in_a_line(start: StartServer) -> None:
    server = start({"device": "cuda"})
    assert server.process.wait(120) == 2
    server.wait_stopped()
    errors = [line for line in server.lines if not line.startswith("serve-app [")]
    assert len(errors) == 1, server.lines
    assert "setting `device`: cuda, but Ray finds no GPU on this machine" in errors[0]


@pytest.mark.parametrize(
    ("options", "there", "said"),
    [
        ({"num_gpus": 0.5}, {}, "`ray_actor_options.num_gpus` is 0.5, but Ray finds 0 GPU"),
        ({"num_gpus": 2}, {"GPU": 1}, "`ray_actor_options.num_gpus` is 2, but Ray finds 1 GPU"),
        ({"num_cpus": 1000}, {}, "`ray_actor_options.num_cpus` is 1000, but Ray finds"),
        ({"resources": {"x": 1}}, {}, "`ray_actor_options.resources.x` is 1, but Ray finds 0 x"),
    ],
)
def test_what_no_node_has_is_refused_in_a_line(
    start: StartServer, options: dict[str, Any], there: dict[str, float], said: str
) -> None:
    environment = {"RAY_OVERRIDE_RESOURCES": json.dumps(there)} if there else {}
    server = start(
        {"device": "auto"}, environment, deployments=[{"name": "EngineReplica", "ray_actor_options": options}]
    )
    assert server.process.wait(120) == 2
    server.wait_stopped()
    errors = [line for line in server.lines if not line.startswith("serve-app [")]
    assert len(errors) == 1, server.lines
    assert f"deployment EngineReplica: {said}" in errors[0]


def test_replicas_that_share_a_gpu_wait_for_no_other(start: StartServer) -> None:
    """They start, and fail for want of a real one."""
    engine = {"name": "EngineReplica", "ray_actor_options": {"num_cpus": 0, "num_gpus": 0.5}}
    args = {"device": "cuda", "num_replicas": 2}
    server = start(args, {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})}, deployments=[engine])
    assert server.process.wait(240) == 1
    server.wait_stopped()
    # The replicas' own last lines may come behind it.
    assert any("deployment failed" in line for line in server.lines)
    assert [line for line in server.lines if "waiting for" in line] == []


def test_too_few_gpus_are_said_and_ctrl_c_ends_the_wait(start: StartServer) -> None:
    server = start({"device": "cuda", "num_replicas": 2}, {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})})
    said = "waiting for 2 GPUs; the cluster has 1"
    wait_for(lambda: any(said in line for line in server.lines) or server.process.poll() is not None, said, 120)
    server.send(signal.SIGINT, group=True)
    assert server.wait_stopped() == (0, []), server.lines
    assert any(said in line for line in server.lines)
