"""The experiments in a time made of step costs: what a step is priced at, and the directions that
theory gives."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.experiments import latency, waiting, window
from serve_app.experiments.replay import Replay, Way, capacity, replay
from serve_app.experiments.requests import poisson_arrivals
from serve_app.experiments.step_costs import StepCost, fit, pairs_of
from serve_app.workloads.arrivals import Arrival

COST = StepCost(0.004, 0.0005, 1e-7)
POSITIONS = StepCost(0.0, 1.0, 0.0)
PAIRS = StepCost(0.0, 0.0, 1.0)
TWO = [Arrival(0.0, 2, 2), Arrival(0.0, 4, 4)]
"""Prompts of 2 and 4 tokens, outputs of 2 and 4."""


def seconds(way: Way, cost: StepCost) -> list[float]:
    return [step.end_s - step.begin_s for step in replay(way, TWO, cost, slots=2).steps]


@pytest.mark.parametrize(
    ("way", "positions", "pairs"),
    [
        # Both rows are as wide as the longer prompt, and the ended one is computed to the end.
        (Way.PADDED_STATIC, [8, 2, 2, 2], [8 * 4, 2 * 5, 2 * 6, 2 * 7]),
        (Way.PADDED_CONTINUOUS, [8, 2, 1, 1], [8 * 4, 2 * 5, 6, 7]),
        (Way.PACKED_STATIC, [6, 2, 1, 1], [3 + 10, 3 + 5, 6, 7]),
        (Way.PACKED_CONTINUOUS, [6, 2, 1, 1], [3 + 10, 3 + 5, 6, 7]),
    ],
)
def test_what_each_step_computes(way: Way, positions: list[int], pairs: list[int]) -> None:
    assert seconds(way, POSITIONS) == positions
    assert seconds(way, PAIRS) == pairs


def test_pairs_of_a_chunk_are_counted_one_by_one() -> None:
    assert pairs_of(3, 4) == 4 + 5 + 6 + 7


def test_fit_finds_the_costs_that_made_the_steps() -> None:
    steps = [(n, p, COST.seconds(n, p)) for n, p in ((1, 10), (4, 40), (16, 900), (64, 70), (256, 5000))]
    found = fit(steps)
    assert (found.base_s, found.token_s, found.pair_s) == pytest.approx((COST.base_s, COST.token_s, COST.pair_s))
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_no_part_of_a_fitted_cost_is_negative() -> None:
    found = fit([(1, 1, 1.0), (2, 400, 1.9), (4, 10, 3.5), (8, 30, 6.0)])
    assert min(found.base_s, found.token_s, found.pair_s) >= 0


def test_time_passes_while_nobody_is_there() -> None:
    result = replay(Way.PACKED_CONTINUOUS, [Arrival(5.0, 4, 2), Arrival(50.0, 4, 1)], COST, slots=2)
    assert [request.waited_s for request in result.requests] == [0.0, 0.0]
    assert result.requests[1].first_token_s == pytest.approx(COST.seconds(4, 10))


def test_newcomers_wait_for_the_end_of_a_static_batch_and_not_for_a_continuous_one() -> None:
    arrivals = [Arrival(0.0, 4, 50), Arrival(0.01, 4, 5)]
    static, continuous = (replay(way, arrivals, COST, slots=2) for way in (Way.PACKED_STATIC, Way.PACKED_CONTINUOUS))
    assert static.requests[1].started_s == static.requests[0].token_s[-1]
    assert continuous.requests[1].started_s < continuous.requests[0].token_s[5]


@pytest.fixture(scope="module")
def latencies() -> latency.Latencies:
    return latency.run(COST, 120, slots=8)


def test_each_idea_shortens_the_latency(latencies: latency.Latencies) -> None:
    figures = latency.report(latencies)
    for load in ("0.8", "1.1"):
        medians = [figures[way.value][load]["latency_s"]["p50"] for way in Way]
        assert medians == sorted(medians, reverse=True)


def test_latency_rises_with_load(latencies: latency.Latencies) -> None:
    for way in Way:
        p99 = [one["first_token_s"]["p99"] for one in latency.report(latencies)[way.value].values()]
        assert p99 == sorted(p99)


def test_capacity_is_what_a_full_queue_gets() -> None:
    arrivals = poisson_arrivals(120, 1.0, 64, (8, 64))
    full = capacity(arrivals, COST, slots=8)
    flood = replay(Way.PACKED_CONTINUOUS, poisson_arrivals(120, 100 * full, 64, (8, 64)), COST, slots=8)
    assert 120 / flood.requests[-1].token_s[-1] <= 1.05 * full


@pytest.fixture(scope="module")
def sweep() -> waiting.Sweep:
    return waiting.run(COST, 120, slots=8, ratios=(0.0, 0.5, 1.0))


def test_closed_gates_group_admissions(sweep: waiting.Sweep) -> None:
    for by_ratio in sweep.replays.values():
        groups = [waiting.figures_of(result)["newcomers_per_admission"] for result in by_ratio.values()]
        assert groups == sorted(groups)
        assert groups[-1] > groups[0]


def test_a_ratio_trades_first_tokens_for_pauses_where_prefill_is_separate(sweep: waiting.Sweep) -> None:
    for one, other in pairwise(map(waiting.figures_of, sweep.replays["separate"].values())):
        assert other["first_token_p50_s"] > one["first_token_p50_s"]
        assert other["pauses_per_stream"] < one["pauses_per_stream"]
    assert all(waiting.figures_of(one)["pauses_per_stream"] == 0 for one in sweep.replays["fused"].values())


@pytest.fixture(scope="module")
def windows() -> window.Windows:
    return window.run(COST, 100, sizes=(2, 8), waits_s=(0.0, 1.0, 4.0))


def test_longer_waits_fill_batches(windows: window.Windows) -> None:
    for size, by_wait in windows.static.items():
        fills = [window.fill(one, size) for one in by_wait.values()]
        assert fills == sorted(fills)
        assert fills[-1] > fills[0]


def test_continuous_batching_waits_least(windows: window.Windows) -> None:
    def waits(results: dict[float, Replay]) -> list[float]:
        return [window.waited_s(one) for one in results.values()]

    assert window.waited_s(windows.continuous) < min(min(waits(by_wait)) for by_wait in windows.static.values())
    assert waits(windows.static[8])[-1] > waits(windows.static[2])[-1], "large batches take longer to fill"


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("latency", ["step_cost", "capacity_requests_per_s", *Way]),
        ("waiting", ["step_cost", "requests_per_s", "fused", "separate"]),
        ("window", ["step_cost", "static", "continuous"]),
    ],
)
def test_the_commands_end_to_end(tiny_folder: Path, tmp_path: Path, command: str, keys: list[str]) -> None:
    png, json_file = tmp_path / "out.png", tmp_path / "out.json"
    options = ["--model", str(tiny_folder), "--requests", "20", "--threads", "1"]
    result = CliRunner().invoke(app, ["experiment", command, *options, "--png", str(png), "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(json_file.read_text())
    assert list(figures) == keys
    assert figures["step_cost"]["base_s"] >= 0
    assert "A step costs" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
