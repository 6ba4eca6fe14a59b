"""`serve-app serve` from its start to its end: refusals, failures, readiness, drain, nothing left
behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

import tests.quiet_ray  # noqa: F401 (Ray Serve keeps the environment that it is first imported in)
from load_tests.chaos.small_model import write_small_model
from serve_app.launch import launcher
from serve_app.launch.config_file import read_config
from serve_app.launch.config_source import ConfigSource
from serve_app.launch.deployment import find_cause
from serve_app.launch.surroundings import make_rays_token
from tests.serving.conftest import REPOSITORY, Server, launch, wait_for, write_config

StartServer = Callable[..., Server]
Refuse = Callable[[Path], str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The one line with which the launcher refuses a config. In this process, whose environment it
    sets."""

    def refuse(config: Path) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            assert launcher.launch(ConfigSource(file=config)) == 2
        output, errors = capsys.readouterr()
        (line,) = str(errors).splitlines()
        assert (output, line.startswith(f"serve-app: {config}: ")) == ("", True)
        return str(line)

    return refuse


def test_a_refusal_is_one_line_and_a_status(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"engine": {"max_num_seq": 8}}, 8000)
    process = launch(config, {})
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2
    (line,) = str(output).splitlines()
    assert line.startswith(f"serve-app: {config}: ")
    assert "unknown setting `engine.max_num_seq` (did you mean `max_num_seqs`?)" in line


def test_rays_token_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning: who has it runs code through Ray's ports, and Ray writes it as the umask
    has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    make_rays_token()
    assert token.stat().st_mode & 0o777 == 0o600
    made = token.read_text()
    assert re.fullmatch("[0-9a-f]{64}", made)
    token.chmod(0o644)
    make_rays_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert [path.read_text() for path in token.parent.iterdir()] == [made]


def test_a_wrong_value_is_named(refuse: Refuse, tmp_path: Path) -> None:
    assert "`dtype`" in refuse(write_config(tmp_path, {"dtype": "int3"}, 8000))


def test_a_wrong_key_of_serves_own_is_named(refuse: Refuse, tmp_path: Path) -> None:
    path = write_config(tmp_path, {}, 8000)
    path.write_text(path.read_text() + "\nproxy_place: here\n")
    assert "unknown key `proxy_place` (did you mean `proxy_location`?)" in refuse(path)
    path = write_config(tmp_path, {}, 8000)
    path.write_text(path.read_text().replace("host:", "hots:"))
    assert "unknown key `http_options.hots` (did you mean `host`?)" in refuse(path)


def test_a_missing_model_is_named(refuse: Refuse, tmp_path: Path) -> None:
    assert "/no/such/model.gguf" in refuse(write_config(tmp_path, {"model": "/no/such/model.gguf"}, 8000))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"device": "cpu", "quantization": "fp8"}, "setting `quantization`: fp8 needs a GPU, and `device` is cpu"),
        ({"device": "cpu", "engine": {"kv_cache_dtype": "fp8"}}, "setting `engine.kv_cache_dtype`: fp8 needs a GPU"),
        ({"device": "cuda", "quantization": "int8"}, "setting `quantization`: int8 is for CPUs, and `device` is cuda"),
        ({"engine": {"max_model_len": 65}}, "max_model_len: 65 is not between 1 and the model's context length of 64"),
    ],
)
def test_what_no_replica_could_load_is_refused_before_anything_starts(
    refuse: Refuse, tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    (folder / "model.safetensors").touch()
    assert said in refuse(write_config(tmp_path, {"model": str(folder), **args}, 8000))


def test_a_model_without_all_its_weights_is_refused_before_anything_starts(refuse: Refuse, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = write_config(tmp_path, {"model": str(folder)}, 8000)
    (folder / "config.json").write_text("{}")
    assert "has no *.safetensors weights" in refuse(config)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (folder / "1.safetensors").touch()
    assert f"model: folder {folder} lacks 2.safetensors" in refuse(config)


def test_a_taken_port_is_named(refuse: Refuse, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use" in refuse(write_config(tmp_path, {}, port))


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_a_number_that_is_no_port_is_refused(refuse: Refuse, tmp_path: Path, port: int) -> None:
    assert f"http_options.port: {port} is not between 1 and 65535" in refuse(write_config(tmp_path, {}, port))


def test_a_file_without_applications_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    """Serve would take it, and as an update it would delete every application."""
    path = tmp_path / "config.yaml"
    path.write_text("applications: []")
    assert "applications: must name at least one" in refuse(path)


def test_what_is_no_config_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    for text in ("[", "", "applications: 3"):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        refuse(path)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        (["Traceback\nserve_app.errors.ConfigError: model: no weights", "Failed to update."], "model: no weights"),
        (["  File x\nRuntimeError: inner\n\nray.exceptions.RayTaskError: outer"], "ray.exceptions.RayTaskError: outer"),
        (["nothing that looks like an exception\n"], "nothing that looks like an exception"),
        ([], "no reason given"),
    ],
)
def test_the_cause_is_found_in_rays_reports(reports: list[str], cause: str) -> None:
    assert find_cause(reports) == cause


@pytest.mark.cluster
def test_a_deployment_that_fails_ends_it_with_the_cause(start: StartServer, tmp_path: Path) -> None:
    # whole but for the weights, whose inside only the replica looks at
    write_small_model(tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    server = start({"model": str(tmp_path / "model"), "device": "cpu"})
    server.said("deploying", 60)
    family = server.descendants()
    assert server.process.wait(120) == 1
    server.wait_stopped()
    # The replicas' own last lines may come behind it.
    (failure,) = [line for line in server.lines if line.startswith("serve-app: deployment failed: model: ")]
    assert "incomplete metadata, file not fully covered" in failure
    assert [line for line in server.lines if "Traceback" in line or "File" in line or "stops at once" in line] == []
    assert psutil.wait_procs(family, timeout=10)[1] == []


def num_interrupting(process: psutil.Process) -> int:
    """How many of its threads interrupt others when they wake."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it, or a thread, has ended since
        return sum(os.sched_getscheduler(thread.id) != os.SCHED_BATCH for thread in process.threads())
    return 0


@pytest.mark.cluster
def test_from_ready_to_ctrl_c_with_the_default_config(start: StartServer) -> None:
    """The printed curl works; Ctrl-C, which a terminal sends to every process at once, lets a
    running stream end."""
    args = yaml.safe_load((REPOSITORY / "deploy" / "config.yaml").read_text())["applications"][0]["args"]
    server = start(args)
    server.wait_ready()
    assert "SmolLM2-135M-Instruct has served its first token" in server.line_with("ready: ")
    answer = subprocess.run(server.line_with("  curl "), shell=True, capture_output=True, timeout=120, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    (engine,) = server.running("EngineReplica")
    interrupting = {process: num_interrupting(process) for process in server.descendants()}
    assert 0 < interrupting.pop(engine) < engine.num_threads()
    assert not any(interrupting.values())

    request: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "Once",
        "max_tokens": 900,
        "ignore_eos": True,
    }
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=120) as response:
        for line in response.iter_lines():
            events += [line] if line else []
            if len(events) == 2:
                server.send(signal.SIGINT, group=True)
                server.send(signal.SIGINT, group=True)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 900
    assert server.wait_stopped() == (0, [])
    assert any("stopping" in line for line in server.lines)


@pytest.mark.cluster
@pytest.mark.slow
def test_deaths_are_told_and_a_second_ctrl_c_ends_it(start: StartServer, tmp_path: Path) -> None:
    write_small_model(tmp_path / "model")
    server = start({"model": str(tmp_path / "model"), "served_model_name": "small", "device": "cpu"})
    server.wait_ready()
    (engine,) = server.running("EngineReplica")
    engine.kill()
    told = f"EngineReplica (pid {engine.pid}) died: "
    server.said(told)
    server.said("ready again after", 60)

    family = server.descendants()
    request = {"model": "small", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    request["max_tokens"] = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] - 16
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=60) as response:
        next(response.iter_lines())
        for process in server.running("EngineReplica"):
            process.suspend()  # so that the drain would take its whole time

        def ended() -> bool:
            server.send(signal.SIGINT)
            return server.process.poll() is not None

        wait_for(ended, "it ends at a further Ctrl-C", timeout_s=20)
    assert server.wait_stopped() == (130, [])
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_server_ends_with_the_test_run_that_started_it(tmp_path: Path) -> None:
    """However that ends: a fleet left behind takes the next run's cores."""
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(600)\n")
    starter = (
        "from pathlib import Path; from tests.serving.conftest import launch; import time; "
        f"print(launch(Path({str(sleeper)!r}), {{}}, ('python', '-u')).pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-W", "ignore", "-c", starter], stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        # Before that nothing ties it to its starter yet.
        wait_for(lambda: server.cmdline()[:1] == [str(Path(sys.executable).with_name("python"))], "it runs")
        run.kill()
    assert psutil.wait_procs([server], timeout=20)[1] == []


def test_an_open_server_beyond_this_machine_is_refused_unless_it_is_meant(refuse: Refuse, tmp_path: Path) -> None:
    def config(**ingress: Any) -> Path:
        path = write_config(tmp_path, {"ingress": ingress}, 8000)
        path.write_text(path.read_text().replace("127.0.0.1", "0.0.0.0"))
        return path

    line = refuse(config())
    assert "`ingress.keys_file`: required because the server listens beyond this machine (0.0.0.0)" in line
    assert "keys.yaml: No such file" in refuse(config(keys_file="/no/such/keys.yaml"))
    assert list(read_config(ConfigSource(file=config(allow_anonymous=True)), tmp_path).ours) == ["serve_app"]


def test_a_broken_keys_file_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("team: {sha256: abc}")
    line = refuse(write_config(tmp_path, {"ingress": {"keys_file": str(tmp_path / "keys.yaml")}}, 8000))
    assert "team: `sha256` must be 64 hexadecimal digits" in line
