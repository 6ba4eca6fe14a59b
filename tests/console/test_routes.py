"""What the console's routes answer, and what they allow a browser to do."""

from collections.abc import Iterator

import httpx
import orjson
import pytest

from serve_app.observability.step_ring import Recording
from tests.console.conftest import REPLICAS, SLOTS, ConsoleServer


@pytest.fixture
def http(console: ConsoleServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=console.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def _some_steps(console: ConsoleServer) -> None:
    body = {"prompt": ["one two three", "four"], "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{console.url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/console/style.css", "/console/console.js", "/console/icon.svg"])
def test_pages_may_load_nothing_from_elsewhere(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/console/", "/console/nothing.js", "/console/..%2Froutes.py", "/console/routes.py"])
def test_only_the_pages_files_are_served(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


def test_json_holds_every_replica_and_the_queue(http: httpx.Client) -> None:
    state = http.get("/debug/timeline", params={"seconds": 600}).json()
    assert state["queue"] == {"waiting": 0, "ongoing": 0}
    recordings = [Recording.from_json(recording) for recording in state["replicas"]]
    assert [recording.replica for recording in recordings] == list(REPLICAS)
    for recording in recordings:
        assert recording.num_slots == SLOTS
        assert sum(record.num_output_tokens for record in recording.records) >= 5
        assert abs(recording.records[-1].started_at - state["now"]) < 600


def test_seconds_bounds_how_far_back(http: httpx.Client) -> None:
    state = http.get("/debug/timeline", params={"seconds": 0.000001}).json()
    assert [recording["records"] for recording in state["replicas"]] == [[], []]


def test_one_replica(http: httpx.Client) -> None:
    state = http.get("/debug/timeline", params={"replica": "beta"}).json()
    assert [recording["replica"] for recording in state["replicas"]] == ["beta"]


def test_trace(http: httpx.Client) -> None:
    trace = http.get("/debug/timeline", params={"format": "trace", "seconds": 600}).json()
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"replica alpha", "replica beta"}


def test_the_picture_holds_its_data_and_allows_nothing_else(http: httpx.Client) -> None:
    answer = http.get("/debug/timeline", params={"format": "html", "seconds": 600})
    data = answer.text.partition('type="application/json">')[2].partition("</script>")[0]
    assert [recording["replica"] for recording in orjson.loads(data)] == list(REPLICAS)
    assert "src=" not in answer.text
    assert "import " not in answer.text.replace("@import", "")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "self" not in policy


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"format": "pdf"}, "format"),
        ({"seconds": "many"}, "seconds"),
        ({"seconds": "nan"}, "seconds"),
        ({"seconds": "0"}, "seconds"),
        ({"seconds": "1e9"}, "seconds"),
        ({"replica": "<script>"}, "replica"),
    ],
)
def test_wrong_questions_are_refused(http: httpx.Client, params: dict[str, str], param: str) -> None:
    answer = http.get("/debug/timeline", params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "<script>" not in answer.text
