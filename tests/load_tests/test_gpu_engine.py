"""The GPU bench runs on the tiny shape, on a machine that has only torch, transformers and numpy."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
# What stands as None cannot be imported, and nobody finds it.
sys.modules.update(dict.fromkeys({absent!r}))
from load_tests.gpu_engine import main
sys.argv[1:] = {arguments!r}
raise SystemExit(main())
"""
ABSENT = {
    *("pydantic", "ray", "gguf", "fastapi", "typer", "rich", "orjson", "prometheus_client", "matplotlib"),
    *("aiohttp", "psutil", "accelerate", "pynvml"),
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


def test_runs_without_the_servers_packages(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--json", str(report), "--only", "parity,decode,prefill"]
    code = RUN.format(absent=ABSENT, arguments=arguments)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
    assert len(checks) == 10
    assert checks["tiny parity, float32"]["equal"] == 6
    assert checks["tiny decode, batch 4, context 64"]["floor_ms"] > 0
