"""Runs a suite's stages one after another, each in its own process with its own verdict.

A stage is a process because an illegal access on a GPU makes all later calls of its process fail.
Each result is written at once, as JSON and as a Markdown table. A resumed run skips stages with a
verdict.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.gpu.checks import CHECK_PREFIX
from load_tests.gpu.suites import Suite

_INTERRUPTED, _LEFT_OUT, _TIMED_OUT = "interrupted", "left out", "timed out"
_STOP_LIMIT_S = 20.0
_TAIL_LINES = 120
"""Maximum number of lines of a failed stage's output in the report, with its servers' logs."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results so far. stages: by name, each {"verdict", "took_s", "checks", "output_tail"}."""

    file: Path | None
    stages: dict[str, dict[str, Any]]

    @classmethod
    def opened(cls, file: Path | None, *, resume: bool) -> "Report":
        """Return a new report, or with `resume` the one in `file` if it exists."""
        if file is not None and resume and file.exists():
            return cls(file, json.loads(file.read_text())["stages"])
        return cls(file, {})

    def write(self) -> None:
        """Write JSON, and the table as Markdown beside it. Readers never see a partial file."""
        if self.file is None:
            return
        _replace(self.file, json.dumps({"command": sys.argv, "stages": self.stages}, indent=1) + "\n")
        _replace(self.file.with_suffix(".md"), self.table())

    def table(self) -> str:
        """Return the table, with a line for each stage and each of its checks."""
        lines = ["| stage | check | limit | verdict | ratio | figures |", "|---|---|---|---|---|---|"]
        for name, stage in self.stages.items():
            lines.append(f"| **{name}** | | | {stage['verdict']} | | {stage['took_s']:.0f} s |")
            lines += [f"| | {check['name']} | {check['limit']} | {_cells(check)} |" for check in stage["checks"]]
        return "\n".join(lines) + "\n"


def run_suite(suite: Suite, device: str, only: Sequence[str], minutes: float, report: Report) -> bool:
    """Run the stages without a verdict. Return whether all selected stages passed.

    only: strings of which a stage's name must contain one; empty for all stages. minutes: limit of
    the whole run; no stage starts after it. Raises `ValueError` if `only` selects none.
    """
    deadline = time.monotonic() + 60 * minutes
    stages = [name for name in suite.stages(device) if not only or any(word in name for word in only)]
    if not stages:
        raise ValueError(f"no stage's name contains {' or '.join(only)}; stages: {', '.join(suite.stages(device))}")
    for name in stages:
        if report.stages.get(name, {}).get("verdict", _INTERRUPTED) not in (_INTERRUPTED, _LEFT_OUT):
            continue
        left_s = deadline - time.monotonic()
        if left_s < 10:
            report.stages[name] = {"verdict": _LEFT_OUT, "took_s": 0.0, "checks": []}
            continue
        run_stage(suite, name, device, min(suite.stage_limit_s, left_s), report)
        if report.stages[name]["verdict"] == _TIMED_OUT and left_s < suite.stage_limit_s:
            # not for its own length: a resumed run tries again
            report.stages[name]["verdict"] = _INTERRUPTED
    report.write()
    return all(report.stages[name]["verdict"] == "passed" for name in stages)


def run_stage(suite: Suite, name: str, device: str, limit_s: float, report: Report) -> None:
    """Run one stage to its end or limit. Its checks are added to the report as they end."""
    environment = {**os.environ, **(suite.cpu_environment if device == "cpu" else {})}
    begin, checks, tail = time.monotonic(), list[dict[str, Any]](), deque[str](maxlen=_TAIL_LINES)
    stage = report.stages[name] = {"verdict": _INTERRUPTED, "took_s": 0.0, "checks": checks}
    process = subprocess.Popen(
        [sys.executable, "-m", suite.module, *name.split(), "--device", device],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        process.terminate()  # a stage stops its server
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(CHECK_PREFIX):
                checks.append(json.loads(line.removeprefix(CHECK_PREFIX)))
                print(line, end="", flush=True)
                report.write()
            else:
                tail.append(line.rstrip())
        status = process.wait()
    finally:
        timer.cancel()
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    stage["took_s"] = round(time.monotonic() - begin, 1)
    stage["verdict"] = _TIMED_OUT if timed_out.is_set() else _verdict(status, checks)
    print(f"{name}: {stage['verdict']} after {stage['took_s']:.0f} s", flush=True)
    if stage["verdict"] != "passed":
        stage["output_tail"] = list(tail)
        print(*(f"    {line}" for line in tail), sep="\n", flush=True)
    report.write()


def _verdict(status: int, checks: list[dict[str, Any]]) -> str:
    if status < 0:
        return f"crashed ({signal.Signals(-status).name})"
    if any(not check["passed"] for check in checks):
        return "failed"
    return "passed" if status == 0 and checks else f"crashed (exit status {status})"


def _cells(check: dict[str, Any]) -> str:
    known = {"name", "limit", "passed", "ratio", "took_s"}
    figures = {key: value for key, value in check.items() if key not in known and isinstance(value, float | int | str)}
    text = ", ".join(f"{key} {_figure(value)}" for key, value in figures.items()).replace("|", "/")
    verdict = "skipped" if "skipped" in check else "passed" if check["passed"] else "**failed**"
    return f"{verdict} | {_figure(check.get('ratio'))} | {text}"


def _figure(value: float | int | str | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _replace(file: Path, text: str) -> None:
    scratch = file.with_name(file.name + ".part")
    scratch.write_text(text)
    scratch.replace(file)
