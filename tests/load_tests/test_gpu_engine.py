"""The GPU bench runs on the tiny shape, on a machine that has only torch, transformers and numpy."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import load_tests
from load_tests import gpu_engine
from load_tests.gpu_engine import CPU_STAGES

ABSENT = {
    *("pydantic", "ray", "gguf", "fastapi", "typer", "rich", "orjson", "prometheus_client", "matplotlib"),
    *("aiohttp", "psutil", "accelerate", "pynvml", "llguidance"),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the metadata is the Triton backend's")
def test_the_hosts_part_is_timed_while_all_rows_decode() -> None:
    from load_tests.gpu_host import measure

    found = measure(rows=4, context=40, steps=6)
    assert set(found) == {"schedule", "execute", "resolve", "update", "all"}
    assert {len(times) for times in found.values()} == {9}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the metadata is the Triton backend's")
def test_the_hosts_part_is_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from load_tests.gpu_host import main

    file = tmp_path / "host.json"
    monkeypatch.setattr("sys.argv", ["gpu_host", "--rows", "2", "--context", "40", "--steps", "4", "--json", str(file)])
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
        [sys.executable, "-m", "load_tests.gpu_engine", "--device", "cpu", "--json", str(report)],
        capture_output=True, text=True, timeout=850, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    stages = json.loads(report.read_text())["stages"]
    assert tuple(stages) == CPU_STAGES
    assert {stage["verdict"] for stage in stages.values()} == {"passed"}
    checks = {check["name"]: check for stage in stages.values() for check in stage["checks"]}
    assert checks["tiny tokens, float32"]["equal"] == 3
    assert checks["tiny decode, batch 3, context 40"]["floor_ms"] > 0
    assert report.with_suffix(".md").read_text() in result.stdout


STAGE = """
import os, sys, time
check = 'CHECK {"name": "first", "limit": "none", "passed": %s}'
print("starting")
print(check % ("false" if sys.argv[1] == "fails" else "true"), flush=True)
if sys.argv[1] == "crashes":
    os.abort()
if sys.argv[1] == "hangs":
    time.sleep(60)
raise SystemExit(sys.argv[1] == "fails")
"""


def test_a_stage_that_crashes_or_hangs_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found before is kept; a report that is resumed runs what has no verdict yet."""
    package = tmp_path / "load_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "gpu_checks.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_engine, "CPU_STAGES", ("crashes", "hangs", "fails", "works"))
    monkeypatch.setattr(gpu_engine, "STAGE_LIMIT_S", 5.0)
    file = tmp_path / "report.json"
    arguments = ["gpu_engine", "--device", "cpu", "--json", str(file), "--resume"]
    monkeypatch.setattr("sys.argv", [*arguments, "--only", "crashes,hangs,fails"])
    assert gpu_engine.main() == 1
    monkeypatch.setattr("sys.argv", arguments)
    assert gpu_engine.main() == 1
    stages = json.loads(file.read_text())["stages"]
    verdicts = {name: stage["verdict"] for name, stage in stages.items()}
    assert verdicts == {"crashes": "crashed (SIGABRT)", "hangs": "timed out", "fails": "failed", "works": "passed"}
    assert {len(stage["checks"]) for stage in stages.values()} == {1}
    assert stages["crashes"]["output_tail"][0] == "starting"
