"""A hub id is pinned to a commit; files are told apart by what is in them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.model_files import digest_content, locate_model, pin_model
from serve_app.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_model(home: Path) -> None:
    """A model as huggingface_hub keeps it."""
    folder = home / "hub" / "models--org--name"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


def pin(home: Path, model: str, environment: dict[str, str]) -> str:
    """The last line of `pin_model` in a process whose cache is in `home`."""
    code = f"from serve_app.checkpoints.model_files import pin_model; print(pin_model({model!r}))"
    environment = {**os.environ, "HF_HOME": str(home), **environment}
    run = subprocess.run((sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=False)
    return (run.stdout or run.stderr).strip().splitlines()[-1]


def pin_offline(home: Path, model: str) -> str:
    """`pin` without asking the hub."""
    return pin(home, model, {"HF_HUB_OFFLINE": "1"})


def test_a_hub_id_is_pinned_to_the_commit_that_its_main_branch_has(tmp_path: Path) -> None:
    cached_model(tmp_path)
    assert pin_offline(tmp_path, "org/name") == f"org/name@{COMMIT}"
    refused = pin_offline(tmp_path, "org/other")
    assert "ConfigError: model: org/other is not in the cache (HF_HOME), and the hub cannot be reached: " in refused


class Hub(BaseHTTPRequestHandler):
    """Answers each model's id in its own way."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name == "slow":
            threading.Event().wait(8)
        body = json.dumps({"id": f"org/{name}", "sha": COMMIT}).encode()
        self.send_response({"gated": 403, "missing": 401}.get(name, 200))
        if name in ("gated", "missing"):
            self.send_header("X-Error-Code", "GatedRepo" if name == "gated" else "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client of the slow one has left
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("open", f"org/open@{COMMIT}"),
        ("gated", "model: org/gated is gated: accept its terms on the hub and set HF_TOKEN"),
        ("missing", "model: org/missing does not exist on the hub, or is private: check the id, or set HF_TOKEN"),
        ("slow", "model: org/slow is not in the cache (HF_HOME), and the hub cannot be reached: "),
    ],
)
def test_what_a_hub_answers_is_one_line(tmp_path: Path, name: str, said: str) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{hub.server_port}"
        answer = pin(tmp_path, f"org/{name}", {"HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1"})
    finally:
        hub.shutdown()
        hub.server_close()
    assert said in answer


def test_what_is_pinned_or_no_hub_id_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for model in (f"org/name@{COMMIT}", str(tmp_path), "default"):
        assert pin_model(model) == model


def test_a_pinned_hub_id_keeps_its_name_and_is_its_own_digest() -> None:
    files = locate_model(f"org/name@{COMMIT}")
    assert (files.kind, files.name, files.source, files.commit) == ("hub", "org/name", "org/name", COMMIT)
    assert digest_content(files) == f"org/name@{COMMIT}"
    with pytest.raises(ConfigError):
        locate_model("org/name@main")


def test_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    one, same, other = (tmp_path / f"{name}.gguf" for name in "abc")
    for path, data in ((one, b"weights"), (same, b"weights"), (other, b"Weights")):
        path.write_bytes(data)
    digests = [digest_content(locate_model(str(path))) for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
