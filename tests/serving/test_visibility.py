"""What a real server shows of itself: the console, the timeline, a line for every request. At the
end it is killed."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.observability.step_ring import Recording
from tests.serving.conftest import SLOTS, Server, wait_for

pytestmark = pytest.mark.cluster


def complete(server: Server, request_id: str, max_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=60)
    assert answer.status_code == 200


def request_line(server: Server, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def appears() -> bool:
        found[:] = [json.loads(line) for line in server.lines if f'"request_id":"{request_id}"' in line]
        return bool(found)

    wait_for(appears, f"a line of {request_id}")
    assert len(found) == 1
    return found[0]


def test_the_console_comes_with_its_policy(server: Server) -> None:
    page = httpx.get(server.url)
    assert "<title>serve_app</title>" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{server.url}/console/console.js").headers["content-type"].startswith("text/javascript")
    assert len(page.headers.get_list("x-request-id")) == 1


def test_the_console_asks_it_to_render_an_answer(server: Server) -> None:
    answer = httpx.post(f"{server.url}/markdown", json={"text": "**bold**"}, timeout=60)
    assert answer.json() == [[0, "<p><strong>bold</strong></p>\n"]]


def test_a_request_is_found_in_its_line_and_in_the_timeline(server: Server) -> None:
    complete(server, "seen-17", max_tokens=9)
    line = request_line(server, "seen-17")
    assert (line["outcome"], line["output_tokens"], line["endpoint"]) == ("completed", 9, "completions")
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["seconds"]
    state = httpx.get(f"{server.url}/debug/timeline", params={"seconds": 300}).json()
    assert state["queue"] == {"waiting": 0, "ongoing": 0}
    (recording,) = (Recording.from_json(replica) for replica in state["replicas"])
    assert line["replicas"] == [recording.replica]
    assert recording.num_slots == SLOTS
    (engine_id,) = line["engine_ids"]
    steps = [(record, row) for record in recording.records for row in record.rows if row.request_id == f"{engine_id}.1"]
    rows = [row for _, row in steps]
    assert sum(row.samples + record.num_accepted_tokens for record, row in steps) == 9
    assert sum(row.num_tokens for row in rows if row.is_prefill) == line["prompt_tokens"]


def test_serve_app_timeline(server: Server, tmp_path: Path) -> None:
    complete(server, "seen-18", max_tokens=5)
    page, trace = tmp_path / "timeline.html", tmp_path / "trace.json"
    command = [str(Path(sys.executable).with_name("serve-app")), "timeline", "--url", server.url, "--seconds", "300"]
    told = subprocess.run(
        [*command, "--html", str(page), "--trace", str(trace)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("slot ") == SLOTS
    assert "▇" in told.stdout
    assert "What the batch did" in page.read_text()
    assert any(event["name"].startswith("decode") for event in json.loads(trace.read_text())["traceEvents"])
    wrong = subprocess.run([*command, "--replica", "none"], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, "replica" in wrong.stdout) == (1, True)


def test_a_killed_launcher_takes_everything_with_it(server: Server) -> None:
    """The last of all tests with this server."""
    everybody = server.descendants()
    # Ray's two agents of the node notice after about a minute; they hold nothing that others would
    # miss.
    family = [process for process in everybody if "Agent" not in process.name()]
    server.process.kill()
    assert len(family) > 5
    assert psutil.wait_procs(family, timeout=20)[1] == []
    for process in everybody:  # the agents still hold the pipe that `wait_stopped` reads to its end
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait_stopped()
