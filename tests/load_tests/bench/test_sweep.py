"""The sweep's settings are real ones, come fused beside separate, and are drawn; no server is
started here."""

from pathlib import Path
from typing import Any

import yaml

from load_tests.bench.sweep import PREFILLS, VALUES, Setting, arrivals_at, server_of, settings_to_try
from load_tests.bench.sweep_report import KNOBS, draw_sweep, medians, sweep_page
from serve_app.settings import Settings
from tests.workloads.fake_server import WRITER

CONFIG = Path(__file__).parents[3] / "deploy" / "config.yaml"


def point(setting: Setting, rate: float, factor: float = 1.0) -> dict[str, Any]:
    latencies = {"p50": 10.0 * factor, "p90": 20.0 * factor, "p99": 30.0 * factor}
    summary = {"output_tok_s": 90.0 * rate, "goodput": 1.0, "failures": 0, "ttft_ms": latencies, "itl_ms": latencies}
    return {"prefill": setting.prefill, "knob": setting.knob, "value": setting.value, "rate": rate, "summary": summary}


def test_every_setting_is_one_that_the_server_takes(tmp_path: Path) -> None:
    assert set(KNOBS) == set(VALUES)
    for setting in settings_to_try(list(VALUES), quick=False):
        command = server_of(setting, CONFIG, tmp_path, 8765)
        document = yaml.safe_load(Path(command.command[-1]).read_text())
        engine = Settings.model_validate(document["applications"][0]["args"]).engine
        assert document["http_options"]["port"] == 8765
        assert engine.prefill == setting.prefill
        assert not setting.knob or getattr(engine, setting.knob) == setting.value


def test_the_values_are_not_the_defaults() -> None:
    defaults = Settings().engine
    for knob, values in VALUES.items():
        assert getattr(defaults, knob) not in values


def test_defaults_come_first_and_last_and_prefills_side_by_side() -> None:
    order = settings_to_try(list(VALUES), quick=False)
    assert [setting.prefill for setting in order] == list(PREFILLS) * (len(order) // 2)
    assert order[:2] == order[-2:] == [Setting("fused"), Setting("separate")]
    assert len(set(order)) == 2 * (1 + sum(map(len, VALUES.values()))) == len(order) - 2
    assert len(settings_to_try(["max_num_seqs"], quick=True)) == 4


def test_the_wait_is_tried_where_it_matters() -> None:
    assert Setting("fused", "max_wait_s", 5.0).engine["waiting_served_ratio"] > 0


def test_every_setting_gets_the_same_arrivals() -> None:
    first, second = (arrivals_at(20.0, 3.0, WRITER, seed=0) for _ in range(2))
    assert first == second
    assert all(item.prompt_tokens <= 256 and item.output_tokens <= 64 for item in first.items)


def test_repeated_points_count_as_their_median() -> None:
    setting = Setting("fused")
    points = [point(setting, 1.0, factor) for factor in (1.0, 3.0)] + [point(setting, 2.0)]
    curve = medians(points, "fused", "", 0.0)
    assert [(rate, figures["ttft_ms"]["p50"]) for rate, figures in curve] == [(1.0, 20.0), (2.0, 10.0)]


def test_the_page_shows_every_setting() -> None:
    settings = settings_to_try(list(VALUES), quick=True)
    points = [point(setting, rate, 1 + index / 10) for index, setting in enumerate(settings) for rate in (1.0, 2.0)]
    html = sweep_page({"cores": 2}, points)
    for setting in settings:
        assert str(setting) in html
    assert len(draw_sweep(points).axes) == 3 * len(KNOBS)


def test_drift_is_last_over_first() -> None:
    points = [point(Setting("fused"), 1.0), point(Setting("fused"), 1.0, 1.5)]
    assert "<td>1.5</td><td>1.5</td>" in sweep_page({}, points)
