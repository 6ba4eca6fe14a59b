"""`serve-app bench`: named workloads against a server, and what two reports say about each
other."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.workloads.ratios import compare_results, read_results
from tests.workloads.fake_server import answer, serving


def report(rates: list[float], ttft: list[float]) -> dict[str, Any]:
    """A report of one workload with these runs."""
    runs = [{"output_tok_s": rate, "ttft_ms": {"p50": t, "p99": None}} for rate, t in zip(rates, ttft, strict=True)]
    middle = sorted(rates)[len(rates) // 2], sorted(ttft)[len(ttft) // 2]
    return {"w": {"median": {"output_tok_s": middle[0], "ttft_ms": {"p50": middle[1], "p99": None}}, "runs": runs}}


async def test_workloads_run_and_both_reports_are_written(tmp_path: Path) -> None:
    async with serving() as (fake, server):
        options = [
            "--base-url",
            server.base_url,
            "--workload",
            "decode,single",
            "--num-requests",
            "3",
            "--repeats",
            "2",
        ]
        files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
        result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", "run", *options, *files])
    assert result.exit_code == 0, result.output
    results = read_results(tmp_path / "a.json")
    assert [(name, len(one["runs"]), one["median"]["requests"]) for name, one in results.items()] == [
        ("decode", 2, 3),
        ("single", 2, 3),
    ]
    html = (tmp_path / "a.html").read_text()
    assert "decode" in html
    assert "data:image/svg" in html
    assert len(fake.bodies) == 17 + 12
    files = [str(tmp_path / "a.json"), str(tmp_path / "a.json")]
    html = tmp_path / "ratios.html"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "compare", *files, "--html", str(html)])
    assert result.exit_code == 0
    assert "data:image/svg" in html.read_text()
    assert "within the spread" in result.output


async def test_failures_and_wrong_lengths_fail_the_command() -> None:
    async with serving() as (fake, server):
        fake.script = lambda body: answer(body if body["max_tokens"] == 16 else body | {"max_tokens": 5})
        options = ["--base-url", server.base_url, "--workload", "single", "--num-requests", "1"]
        result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", "run", *options])
    assert result.exit_code == 1
    assert "wrong length" in result.output


def test_a_server_that_is_not_there_is_said_in_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "run", "--base-url", "http://127.0.0.1:9", "--workload", "single"])
    assert result.exit_code == 1
    assert "Cannot connect" in result.output
    assert "127.0.0.1:9" in result.output


def test_an_unknown_workload_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "run", "--workload", "decode,decod"])
    assert result.exit_code == 2
    assert "'decod'" in result.output


def test_a_difference_counts_only_beyond_every_run() -> None:
    a = report([100.0, 110.0, 105.0], [50.0, 55.0, 60.0])
    rate, ttft = compare_results(a, report([120.0, 130.0, 125.0], [70.0, 58.0, 65.0]))
    assert (rate.figure, rate.a, rate.b) == ("output tok/s", 105.0, 125.0)
    assert (rate.low, rate.high) == pytest.approx((120 / 110, 130 / 100))
    assert rate.verdict == "B better"
    assert (ttft.figure, ttft.verdict) == ("TTFT p50 ms", "within the spread")
    assert compare_results(a, report([90.0, 95.0, 99.0], [70.0, 75.0, 65.0]))[0].verdict == "A better"
    assert compare_results(a, report([90.0, 95.0, 99.0], [70.0, 75.0, 65.0]))[1].verdict == "A better"
    assert compare_results(a, report([90.0], [20.0]))[0].verdict == "one run has no spread"


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in ("{}", "[]", "no json", '{"results": {"w": {}}}', '{"results": 3}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=r"x\.json is not a report"):
            read_results(tmp_path / "x.json")
