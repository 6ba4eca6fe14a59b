"""`make test-all` runs every group of tests, whatever comes of those before."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("failing", "status"), [("none", 0), ("tests/core --cov", 2), ("--ignore", 2), ("not (", 2)])
def test_all_groups_run_and_a_failure_is_reported(tmp_path: Path, failing: str, status: int) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    python = programs / "python"
    python.write_text(f'#!/bin/sh\necho "group: $*"\ncase "$*" in *"{failing}"*) exit 1;; esac\n')
    python.chmod(0o755)
    for stamp in (".serve", ".test"):
        (tmp_path / stamp).touch()
    made = subprocess.run(
        [
            "make",
            "-f",
            ROOT / "Makefile",
            "test-all",
            f"VENV={tmp_path}",
            "-o",
            f"{tmp_path}/.test",
            "-o",
            f"{tmp_path}/.serve",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == status
    assert made.stdout.count("\ngroup: -m pytest") + made.stdout.startswith("group:") == 3
