"""The GPU bench runs on the tiny shape, on a machine that has only torch, transformers and
numpy."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import load_tests
from load_tests.gpu import reference, suites
from load_tests.gpu.runner import Report, run_suite
from load_tests.gpu.suites import Suite
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness

ABSENT = {
    *("pydantic", "ray", "gguf", "fastapi", "typer", "rich", "orjson", "prometheus_client", "matplotlib"),
    *("aiohttp", "psutil", "accelerate", "pynvml", "llguidance"),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the metadata is the Triton backend's")
def test_the_hosts_part_is_timed_while_all_rows_decode() -> None:
    from load_tests.gpu.host import measure

    found = measure(rows=4, context=40, steps=6)
    assert set(found) == {"schedule", "execute", "resolve", "update", "all"}
    assert {len(times) for times in found.values()} == {9}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the metadata is the Triton backend's")
def test_the_hosts_part_is_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from load_tests.gpu.host import main

    file = tmp_path / "host.json"
    monkeypatch.setattr("sys.argv", ["host", "--rows", "2", "--context", "40", "--steps", "4", "--json", str(file)])
    main()
    result = json.loads(file.read_text())
    assert (result["rows"], result["context"], result["steps"]) == (2, 40, 4)
    assert result["ms"]["all"] > result["ms"]["schedule"] > 0
    assert result["machine"]["cores"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_sequence_runs_without_the_servers_packages(tmp_path: Path) -> None:
    """Every stage on the tiny shape, each in its process."""
    # What stands as None cannot be imported, and nobody finds it.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    path = f"{tmp_path}{os.pathsep}{Path(load_tests.__file__).parents[1]}"
    report = tmp_path / "report.json"
    result = subprocess.run(
        [sys.executable, "-m", "load_tests.gpu", "engine", "--device", "cpu", "--json", str(report)],
        capture_output=True, text=True, timeout=850, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    stages = json.loads(report.read_text())["stages"]
    assert tuple(stages) == suites.ENGINE.cpu
    assert {stage["verdict"] for stage in stages.values()} == {"passed"}
    checks = {check["name"]: check for stage in stages.values() for check in stage["checks"]}
    assert checks["tiny tokens, float32"]["equal"] == 3
    assert checks["tiny decode, batch 3, context 40"]["floor_ms"] > 0
    assert report.with_suffix(".md").read_text() in result.stdout


def test_the_reference_writes_what_the_engine_writes(
    default_model: PagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, count = "The capital of France is", 6
    monkeypatch.setattr("sys.argv", ["reference", json.dumps({"prompts": [prompt], "count": count, "device": "cpu"})])
    reference.main()
    tokenizer = load_tokenizer("default")
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    run = Harness(default_model).run([EngineRequest("0", tuple(tokenizer.encode(prompt)), params)])
    [text] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert text == tokenizer.decode(run.outcomes["0", 0].token_ids)


def test_a_selection_of_no_stage_is_no_success() -> None:
    command = [sys.executable, "-m", "load_tests.gpu", "serve", "--only", "chaso", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("--only: no stage's name contains chaso; stages: machine, start, ")


def test_a_stage_that_the_end_of_the_run_cuts_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    suite, file = Suite("stage", gpu=(), cpu=("hangs", "works")), tmp_path / "report.json"
    assert not run_suite(suite, "cpu", [], 12 / 60, Report.opened(file, resume=True))
    verdicts = {name: stage["verdict"] for name, stage in json.loads(file.read_text())["stages"].items()}
    assert verdicts == {"hangs": "interrupted", "works": "left out"}
    monkeypatch.setenv("WOKEN", "1")
    assert run_suite(suite, "cpu", [], 10, Report.opened(file, resume=True))


STAGE = """
import os, sys, time
check = 'CHECK {"name": "first", "limit": "none", "passed": %s}'
print("starting")
print(check % ("false" if sys.argv[1] == "fails" else "true"), flush=True)
if sys.argv[1] == "crashes":
    os.abort()
if sys.argv[1] == "hangs" and "WOKEN" not in os.environ:
    time.sleep(60)
raise SystemExit(sys.argv[1] == "fails")
"""


def test_a_stage_that_crashes_or_hangs_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it found before is kept; a report that is resumed runs what has no verdict yet."""
    (tmp_path / "stage.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    suite = Suite("stage", gpu=(), cpu=("crashes", "hangs", "fails", "works"), stage_limit_s=5.0)
    file = tmp_path / "report.json"
    assert not run_suite(suite, "cpu", ["crashes", "hangs", "fails"], 10, Report.opened(file, resume=True))
    assert not run_suite(suite, "cpu", [], 10, Report.opened(file, resume=True))
    stages = json.loads(file.read_text())["stages"]
    verdicts = {name: stage["verdict"] for name, stage in stages.items()}
    assert verdicts == {"crashes": "crashed (SIGABRT)", "hangs": "timed out", "fails": "failed", "works": "passed"}
    assert {len(stage["checks"]) for stage in stages.values()} == {1}
    assert stages["crashes"]["output_tail"][0] == "starting"
    assert stages["fails"]["output_tail"] == ["starting"]
    assert capfd.readouterr().out.count("    starting\n") == 3, "what a stage printed is in the failure"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_the_servers_whole_sequence_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every stage through a real Ray cluster of its own, on tiny sizes."""
    report = tmp_path / "report.json"
    result = subprocess.run(
        [sys.executable, "-m", "load_tests.gpu", "serve", "--device", "cpu", "--json", str(report), "--minutes", "23"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    stages = json.loads(report.read_text())["stages"]
    verdicts = {name: stage["verdict"] for name, stage in stages.items()}
    assert verdicts == dict.fromkeys(suites.SERVE.cpu, "passed"), result.stdout
    assert result.returncode == 0, result.stdout
    checks = {check["name"]: check for stage in stages.values() for check in stage["checks"]}
    struck = [check for name, check in checks.items() if " streams, SIG" in name]
    assert len(struck) == 3
    assert all(check["equal"] == check["of"] and check["struck"] for check in struck)
