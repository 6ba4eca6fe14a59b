"""A hub id is pinned to a commit; files are told apart by what is in them."""

import os
import subprocess
import sys
from pathlib import Path

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


def pin_offline(home: Path, model: str) -> str:
    """`pin_model` in a process whose cache is in `home`, and which does not ask the hub."""
    code = f"from serve_app.checkpoints.model_files import pin_model; print(pin_model({model!r}))"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run((sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=False)
    return (run.stdout or run.stderr).strip().splitlines()[-1]


def test_a_hub_id_is_pinned_to_the_commit_that_its_main_branch_has(tmp_path: Path) -> None:
    cached_model(tmp_path)
    assert pin_offline(tmp_path, "org/name") == f"org/name@{COMMIT}"
    refused = pin_offline(tmp_path, "org/other")
    assert "ConfigError: model: org/other is not cached, and the hub does not tell its commit: " in refused


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
