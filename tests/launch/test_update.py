"""Updates that Ray lets wait: what is asked for meanwhile is not forgotten, and what is said is
true."""

import threading
from pathlib import Path
from typing import Any

import pytest

import tests.quiet_ray  # noqa: F401
from serve_app.launch import update
from serve_app.launch.bounded import BoundedCalls
from serve_app.launch.config_file import read_config
from serve_app.launch.config_source import ConfigSource
from serve_app.launch.update import Update
from serve_app.serving import gpus, ray_patches
from tests.serving.conftest import wait_for, write_config

MODEL_LEN = "max_model_len"


class Controller:
    """Serve's, which answers once it `may_answer`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.deployed: list[int] = []
        patch.setattr(ray_patches, "deploy_again", self._deploy)
        patch.setattr(update, "is_running", lambda applications: True)
        patch.setattr(gpus.GpuReports, "look", lambda self: None)
        patch.setattr(update, "_DEPLOY_S", 0.0)

    def _deploy(self, schema: Any) -> None:
        self.is_asked.set()
        self.may_answer.wait()
        self.deployed.append(schema.applications[0].args["engine"][MODEL_LEN])


def write(folder: Path, max_model_len: int) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"max_position_embeddings": 64}')
    (model / "model.safetensors").touch()
    return write_config(folder, {"model": str(model), "device": "cpu", "engine": {MODEL_LEN: max_model_len}}, 8000)


def test_what_is_asked_for_while_ray_does_not_answer_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(monkeypatch)
    said: list[str] = []
    source = ConfigSource(file=write(tmp_path, 16))
    ended = threading.Event()
    asked = Update(source, read_config(source, tmp_path), tmp_path, said.append, ended.set)
    rays = BoundedCalls(said.append)

    def look() -> None:
        asked.look(rays, lambda: False)

    for max_model_len in (17, 18):
        write(tmp_path, max_model_len)
        asked.ask()
        look()
        look()
    assert said == [
        "the update: TimeoutError: Ray does not answer within 0 s",
        "the update: TimeoutError: Ray has not answered yet",
    ]
    controller.may_answer.set()

    def has_ended() -> bool:
        look()
        return ended.is_set()

    wait_for(has_ended, "the end of the second update")
    assert controller.deployed == [17, 18]
    again = f"deploying {source} again"
    assert [line for line in said if line in (again, "deployed")] == [again, again, "deployed"]
    assert asked.target.ours["serve_app"].engine.max_model_len == 18


def test_an_update_is_waited_for_no_longer_than_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(monkeypatch)
    monkeypatch.setattr(update, "_DEPLOY_S", 3600.0)
    source, said = ConfigSource(file=write(tmp_path, 16)), list[str]()
    asked = Update(source, read_config(source, tmp_path), tmp_path, said.append, lambda: None)
    stopping = threading.Event()
    follower = threading.Thread(target=asked.follow, args=(stopping,))
    asked.ask()
    follower.start()
    assert controller.is_asked.wait(60)
    stopping.set()
    follower.join(60)
    assert (follower.is_alive(), said) == (False, [])
    controller.may_answer.set()
