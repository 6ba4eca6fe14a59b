"""Which sampled stacks count as failover's, and which as metrics' and step records'."""

import ast
from pathlib import Path

import pytest

import serve_app
from load_tests.chaos.profile_share import PARTS, owner_of

LOOP = "<module> (main.py:1);run_forever (asyncio/base_events.py:608)"
RAY = "_next (ray/serve/_private/replica_result.py:80)"
STEP = ["_run (serve_app/engine/async_engine.py:200)", "step (serve_app/engine/core.py:160)"]
PORT = ["process_request_thread (socketserver.py:692)", "handle (wsgiref/simple_server.py:120)"]


@pytest.mark.parametrize(
    ("frames", "owner"),
    [
        (
            ["generate (serve_app/fleet/failover.py:80)", "accept (serve_app/fleet/resume_state.py:60)"],
            ("failover", "resume_state.accept"),
        ),
        (
            ["_next_item (serve_app/fleet/attempt.py:150)", "__aenter__ (asyncio/timeouts.py:70)"],
            ("failover", "attempt._next_item"),
        ),
        (["_heartbeat (/site-packages/serve_app/serving/replica.py:90)"], ("failover", "replica._heartbeat")),
        (["_next_item (serve_app/fleet/attempt.py:150)", RAY], None),
        (["generate (serve_app/fleet/failover.py:80)", "unpack_item (serve_app/fleet/wire.py:60)"], None),
        (["_flush (serve_app/engine/async_engine.py:200)", "publish (serve_app/fleet/link.py:80)"], None),
        (
            ["ReplicaEnd.send (serve_app/fleet/link.py:180)", "_head (serve_app/fleet/link.py:190)"],
            ("failover", "link._head"),
        ),
        (["data_received (serve_app/fleet/link.py:80)"], ("failover", "link.data_received")),
        (["ReplicaEnd.send (serve_app/fleet/link.py:180)", "_pack (serve_app/fleet/link.py:185)"], None),
        (["publish (serve_app/fleet/link.py:90)", "ReplicaEnd.send (serve_app/fleet/link.py:180)"], None),
        (
            [*STEP, "on_step (serve_app/observability/metrics.py:90)", "observe (prometheus_client/metrics.py:400)"],
            ("observation", "metrics.on_step"),
        ),
        ([*STEP, "_record (serve_app/engine/core.py:170)"], ("observation", "core._record")),
        ([*STEP, "execute (serve_app/model/runner.py:90)"], None),
        ([*PORT, "readline (socket.py:700)"], ("observation", "the metrics port")),
        ([*PORT, "answer (serve_app/observability/metrics_port.py:45)"], ("observation", "metrics_port.answer")),
        ([RAY], None),
        ([], None),
    ],
)
def test_the_innermost_frame_of_ours_decides(frames: list[str], owner: tuple[str, str] | None) -> None:
    assert owner_of(";".join([LOOP, *frames])) == owner


def test_every_name_is_one_of_a_function_that_there_is() -> None:
    functions: dict[str, set[str]] = {}
    for path in Path(serve_app.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        functions.setdefault(path.stem, set()).update(names)
    for part in PARTS.values():
        assert part.modules <= functions.keys()
        for name in part.functions:
            module, _, function = name.partition(".")
            assert function in functions.get(module, ()), f"there is no {name}"
