"""The engine on one GPU against what the GPU can do: a sequence of stages, ordered by what they tell.

`python -m load_tests.gpu_engine --json FILE` needs torch, triton, transformers and numpy; no server, no Ray, and no
weights: models have random ones, of the shapes in `shapes/`. Each stage is a process of its own
(`python -m load_tests.gpu_checks STAGE`) with its own verdict and at most eight minutes, since an illegal access on a
GPU ends all that its process does there. What a check finds is written as it comes, to FILE and as a table beside it;
`--resume` leaves out the stages that FILE has. The exit status is 0 when every stage of the sequence passed.

`--device cpu` runs the sequence on the tiny shape, by Triton's interpreter, to show that it runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGE_LIMIT_S = 480.0
CHECK_PREFIX = "CHECK "
"""Begins the lines on which a stage tells its checks, as JSON."""

_INTERRUPTED, _LEFT_OUT = "interrupted", "left out"

GPU_STAGES = (
    "smoke",
    "kernels",
    "features tiny",
    "parity tiny",
    "parity qwen3-0.6b",
    "graphs tiny",
    "graphs qwen3-0.6b",
    "steps llama-3.1-8b",
    "steps qwen3-0.6b",
    "attention",
    "transformers qwen3-0.6b",
    "transformers llama-3.1-8b",
    "vllm qwen3-0.6b",
    "vllm llama-3.1-8b",
    "steps qwen3-4b",
    "steps llama-3.2-1b",
    "parity llama-3.2-1b",
    "overlap qwen3-0.6b",
    "overlap llama-3.1-8b",
    "prices llama-3.1-8b",
    "host",
    "sanitizer",
)
CPU_STAGES = (
    "smoke",
    "kernels",
    "features tiny",
    "parity tiny",
    "graphs tiny",
    "steps tiny",
    "attention",
    "transformers tiny",
    "vllm tiny",
    "overlap tiny",
    "prices tiny",
    "host",
    "sanitizer",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known so far. stages: by name, each {"verdict", "took_s", "checks", "output_tail"}."""

    file: Path | None
    stages: dict[str, dict[str, Any]]

    @classmethod
    def opened(cls, file: Path | None, *, resume: bool) -> "Report":
        """A new one, or with `resume` the one in `file`, if there is any."""
        if file is not None and resume and file.exists():
            return cls(file, json.loads(file.read_text())["stages"])
        return cls(file, {})

    def write(self) -> None:
        """JSON, and the table as Markdown beside it; whole files, whenever somebody looks."""
        if self.file is None:
            return
        _replace(self.file, json.dumps({"command": sys.argv, "stages": self.stages}, indent=1) + "\n")
        _replace(self.file.with_suffix(".md"), self.table())

    def table(self) -> str:
        """A line for each stage and each of its checks."""
        lines = ["| stage | check | limit | verdict | ratio | figures |", "|---|---|---|---|---|---|"]
        for name, stage in self.stages.items():
            lines.append(f"| **{name}** | | | {stage['verdict']} | | {stage['took_s']:.0f} s |")
            lines += [f"| | {check['name']} | {check['limit']} | {_cells(check)} |" for check in stage["checks"]]
        return "\n".join(lines) + "\n"


def main() -> int:
    """Run the stages, print what they find, write it down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the stage that runs is ended too
    arguments = _arguments()
    report = Report.opened(arguments.json, resume=arguments.resume)
    deadline = time.monotonic() + 60 * arguments.minutes
    stages = [
        name
        for name in (CPU_STAGES if arguments.device == "cpu" else GPU_STAGES)
        if not arguments.only or any(word in name for word in arguments.only.split(","))
    ]
    for name in stages:
        if report.stages.get(name, {}).get("verdict", _INTERRUPTED) not in (_INTERRUPTED, _LEFT_OUT):
            continue
        left_s = deadline - time.monotonic()
        if left_s < 10:
            report.stages[name] = {"verdict": _LEFT_OUT, "took_s": 0.0, "checks": []}
            continue
        run_stage(name, arguments.device, min(STAGE_LIMIT_S, left_s), report)
    report.write()
    print(report.table(), end="")
    return int(any(report.stages[name]["verdict"] != "passed" for name in stages))


def run_stage(name: str, device: str, limit_s: float, report: Report) -> None:
    """Run one stage to its end or to its limit; its checks are in the report as soon as they are known."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    begin, checks, tail = time.monotonic(), list[dict[str, Any]](), deque[str](maxlen=40)
    stage = report.stages[name] = {"verdict": _INTERRUPTED, "took_s": 0.0, "checks": checks}
    process = subprocess.Popen(
        [sys.executable, "-m", "load_tests.gpu_checks", *name.split(), "--device", device],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    timed_out = threading.Event()

    def kill() -> None:
        timed_out.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
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
    stage["verdict"] = "timed out" if timed_out.is_set() else _verdict(status, checks)
    if stage["verdict"] != "passed":
        stage["output_tail"] = list(tail)
    print(f"{name}: {stage['verdict']} after {stage['took_s']:.0f} s", flush=True)
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="words, separated by commas: run stages whose names have one")
    parser.add_argument("--json", type=Path, help="where to write the report; the table goes beside it, as .md")
    parser.add_argument("--resume", action="store_true", help="go on with the report that is there")
    parser.add_argument("--minutes", type=float, default=1440.0, help="begin no stage after, and end the last one then")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
