"""The programs in examples/ run as their README says, against one real server, which is itself an
example."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.launch.ports import free_port
from tests.serving.conftest import Server, launch, running

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """examples/routing_policy.yaml: two replicas of the default model behind the example's routing
    policy."""
    config = yaml.safe_load((EXAMPLES / "routing_policy.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    # Small, for a machine that runs other tests as well.
    config["applications"][0]["args"]["engine"] = {"kv_cache_gib": 0.1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    path = tmp_path_factory.mktemp("examples") / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with running(launch(path, {"PYTHONPATH": str(ROOT)}), port) as server:
        yield server


def run(name: str, url: str = "") -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, "SERVE_APP_URL": url},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat(server: Server) -> None:
    assert re.search(r"Paris.*\n\(\d+ prompt tokens, \d+ output tokens\)", run("chat.py", server.url), re.DOTALL)


def test_tools(server: Server) -> None:
    call, answer = run("tools.py", server.url).split("\n", 1)
    assert re.fullmatch(r"temperature\(\{'city': '(Rome|Oslo)'\}\)", call)
    assert answer.strip()


def test_structured_output(server: Server) -> None:
    fruit, yes, no = run("structured_output.py", server.url).splitlines()
    assert re.fullmatch(r"name='.*' colour='(red|green|yellow)'", fruit)
    assert float(yes.removeprefix("yes: ")) + float(no.removeprefix("no: ")) == pytest.approx(1, abs=0.011)


def test_offline_batch() -> None:
    lines = run("offline_batch.py").splitlines()
    countries = ["France", "Japan", "Italy", "Kenya", "Norway", "Greece"]
    assert [line.split()[3] for line in lines] == countries
    assert "Paris" in lines[0]


def test_the_routing_policy_takes_turns(server: Server) -> None:
    """One request after the other: the same prompt goes to both replicas."""
    for _ in range(4):
        body = {"prompt": "Once upon a time", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    accounts = [one["routing"] for one in httpx.get(f"{server.url}/debug/replicas", timeout=30).json()]
    assert [account["placed"] for account in accounts] == [0, 0]
    first, second = sorted(account["last_turn"] for account in accounts)
    assert second == first + 1 >= 4


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"examples/(\w+\.(?:py|yaml))", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
