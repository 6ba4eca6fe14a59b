"""The open-loop driver as a command: reports written, exit status by the objective."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner

from load_tests.bench.open_loop import main
from tests.workloads.fake_server import FakeServer, answer, serving

app = typer.Typer()
app.command()(main)


async def invoke(*options: Any, script: Any = answer) -> tuple[Result, FakeServer]:
    async with serving() as (fake, server):
        fake.script = script
        command = ["--base-url", server.base_url, *map(str, options)]
        return await asyncio.to_thread(CliRunner().invoke, app, command), fake


async def test_a_run_writes_both_reports_and_meets_its_objective(tmp_path: Path) -> None:
    files = "--json", tmp_path / "run.json", "--html", tmp_path / "run.html"
    result, fake = await invoke("--rate", 40, "--duration", 1, "--slo-ttft", 30, "--slo-tpot", 30, *files)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "run.json").read_text())["results"]["poisson"]["median"]
    warm_up = 17
    assert summary["requests"] == len(fake.bodies) - warm_up > 20
    assert (summary["failures"], summary["wrong_length"], summary["prompt_mismatch"]) == (0, 0, 0)
    assert summary["goodput"] == 1.0
    html = (tmp_path / "run.html").read_text()
    assert "Met: 100.0%" in html
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html), "the report must be one file"
    assert "<script" not in html


async def test_a_missed_objective_is_a_failure(tmp_path: Path) -> None:
    result, _ = await invoke("--rate", 30, "--duration", 1, "--slo-ttft", 0.000001, "--html", tmp_path / "run.html")
    assert result.exit_code == 1
    assert "Missed: 0.0%" in (tmp_path / "run.html").read_text()


async def test_failed_requests_miss_the_objective_too(tmp_path: Path) -> None:
    calls = iter(range(1000))

    def script(body: dict[str, Any]) -> list[Any]:
        return answer(body) if next(calls) < 17 else [503]  # after the warm-up

    html = tmp_path / "run.html"
    result, _ = await invoke("--rate", 30, "--duration", 1, "--slo-ttft", 30, "--html", html, script=script)
    assert result.exit_code == 1
    assert "HTTP 503" in html.read_text()


async def test_a_trace_decides_times_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "small.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,40,3\n2023-11-16 18:17:05,900,70\n")
    limits = "--max-prompt-tokens", 100, "--max-output-tokens", 20, "--slo-ttft", 30, "--slo-tpot", 30
    result, fake = await invoke("--trace", trace, "--speed", 20, *limits, "--json", tmp_path / "run.json")
    assert result.exit_code == 0, result.output
    sent = [(len(body["prompt"].split()), body["max_tokens"]) for body in fake.bodies[17:]]
    assert sent == [(40, 3), (100, 20)]
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["results"]["small"]["median"]["seconds"] >= 0.1
    assert report["circumstances"]["offered_per_s"] == 20.0


async def test_a_file_that_is_no_trace_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    result, _ = await invoke("--trace", tmp_path / "other.csv")
    assert result.exit_code == 1
    assert "header" in result.output


def test_a_server_that_is_not_there_is_said_in_a_line() -> None:
    result = CliRunner().invoke(app, ["--base-url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "Cannot connect" in result.output
    assert "127.0.0.1:9" in result.output
