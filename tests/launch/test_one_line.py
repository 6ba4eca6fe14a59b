"""A model of one's own is served by one line, without a config file."""

import subprocess
from collections.abc import Iterator

import httpx
import pytest

from load_tests.chaos.small_model import write_small_model
from serve_app.launch.ports import free_port
from tests.serving.conftest import Server, launch, running

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEY = "a-key-of-the-command-line"
OPTIONS = (
    *("--served-model-name", "first,second,*", "--api-key", KEY, "--dtype", "float32"),
    *("--set", "engine.kv_cache_gib=0.0017", "--set", "device=cpu", "--set", "engine.max_num_seqs=4"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("one_line") / "model", free_port()
    write_small_model(folder)
    with running(launch(folder, {}, options=("--port", str(port), *OPTIONS)), port) as server:
        yield server


def ask(server: Server, model: str, key: str | None = KEY) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": model, "prompt": "Once", "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_its_names_and_its_key(served: Server) -> None:
    assert [ask(served, "first", key).status_code for key in (KEY, None, "another")] == [200, 401, 401]
    assert [ask(served, name).json()["model"] for name in ("second", "gpt-4o-mini")] == ["first", "first"]
    models = httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"]
    assert [model["id"] for model in models] == ["first", "second"]


def test_the_context_is_what_the_pool_holds(served: Server) -> None:
    served.said("max_model_len: ")
    (model, *_) = httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"]
    assert model["max_model_len"] % 1024 == 0
    assert f"max_model_len: {model['max_model_len']} instead of the model's" in served.line_with("max_model_len: ")


def test_the_terminal_shows_where_to_go(served: Server) -> None:
    """The example is one that this model answers: it has no chat template."""
    assert not any(line.startswith("  chat ") for line in served.lines)
    assert served.line_with("  API ").split()[1] == f"{served.url}/v1"
    assert httpx.get(served.line_with("  docs ").split()[1]).status_code == 200
    command = served.line_with("  curl ").replace("YOUR-KEY", KEY)
    assert "/v1/completions" in command
    answer = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
    assert b'"choices"' in answer.stdout
