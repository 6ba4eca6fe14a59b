"""`serve-app experiment lengths`: more variance, more gain, in counted steps and positions; never a
time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.experiments.compare_runs import CompareJob, Measurement, Mode, OnTokens, measure
from serve_app.experiments.lengths import Lane, Results, draw, report, run
from serve_app.text.tokenizer import Tokenizer

REQUESTS, CAPS, SLOTS = 24, (4, 64), 4


def measure_here(mode: Mode, jobs: Sequence[CompareJob], on_tokens: OnTokens) -> list[Measurement]:
    """Without a process of its own, and with times that are the same on any machine: a second a
    step."""
    measured = [measure(mode, job, on_tokens) for job in jobs]
    return [replace(one, seconds=float(one.steps)) for one in measured]


@pytest.fixture(scope="module")
def results(tiny_folder: Path, tokenizer: Tokenizer) -> Results:
    fields = {"model": str(tiny_folder), "dtype": "float64", "device": "cpu", "num_threads": 1}
    return run(tokenizer, REQUESTS, CAPS, SLOTS, runner=measure_here, **fields)


def steps(results: Results, lane: Lane, cap: int) -> int:
    return results[lane][cap][0].steps


@pytest.mark.wide
def test_more_variance_more_gain(results: Results) -> None:
    gains = [
        steps(results, Lane.PADDED_STATIC, cap) / steps(results, Lane.PADDED_CONTINUOUS, cap) for cap in sorted(CAPS)
    ]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0]
    assert gains[-1] > 1.3


def test_each_idea_takes_away_what_it_says(results: Results) -> None:
    cap = max(CAPS)
    positions = {lane: results[lane][cap][0].positions for lane in Lane}
    assert positions[Lane.PADDED_STATIC] > positions[Lane.PADDED_CONTINUOUS] > positions[Lane.PACKED_CONTINUOUS]
    assert positions[Lane.PACKED_STATIC] == positions[Lane.PACKED_CONTINUOUS], "packed rows hold no padding"
    assert positions[Lane.PAGED] >= positions[Lane.PACKED_CONTINUOUS], "who is preempted is computed again"
    assert steps(results, Lane.PAGED, cap) < steps(results, Lane.PACKED_CONTINUOUS, cap), "paging slots more"
    assert steps(results, Lane.PACKED_STATIC, cap) == steps(results, Lane.PADDED_STATIC, cap)


def test_contributions_multiply_up_to_all(results: Results) -> None:
    figures = report(results)
    product = 1.0
    for one in figures["contributions"][str(max(CAPS))].values():
        assert one["least"] <= one["factor"] <= one["greatest"]
        product *= one["factor"]
    assert product == pytest.approx(figures["all"], rel=1e-2)
    first = figures["packing_first"]
    in_order = figures["contributions"][str(max(CAPS))]
    both = in_order["padded_continuous"]["factor"] * in_order["packed_continuous"]["factor"]
    assert first["packing"] * first["iteration_level"] == pytest.approx(both, rel=1e-2)


def test_lanes_agree_where_no_near_tie_can_decide(results: Results) -> None:
    assert {lane["agreement"] for lane in report(results)["lanes"].values()} == {1.0}


def test_picture(results: Results, tmp_path: Path) -> None:
    draw(tmp_path / "lengths.png", results)
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_command_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    """In fresh processes, as users run it."""
    png, json_file = tmp_path / "lengths.png", tmp_path / "lengths.json"
    options = ["--model", str(tiny_folder), "--requests", "6", "--caps", "2,6", "--slots", "2", "--threads", "1"]
    result = CliRunner().invoke(app, ["experiment", "lengths", *options, "--png", str(png), "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(json_file.read_text())
    assert list(figures["lanes"]) == [lane.value for lane in Lane]
    assert list(figures["lanes"]["paged"]["caps"]) == ["2", "6"]
    assert [len(cap["tokens_per_s"]) for cap in figures["lanes"]["paged"]["caps"].values()] == [1, 2]
    assert "iteration-level scheduling" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("caps", ["", "8,x", "8,0"])
def test_caps_are_checked(caps: str) -> None:
    result = CliRunner().invoke(app, ["experiment", "lengths", "--caps", caps], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not a list of positive numbers" in result.output
