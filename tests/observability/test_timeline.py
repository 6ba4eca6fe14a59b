"""Recorded steps as slots over steps: hand-checked small cases, and a run of the real scheduler."""

from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.observability.timeline import PALETTE, Span, Timeline, Work, draw_png, draw_terminal, timeline_of
from tests.core.fake_model import FakeRunner


def record(*rows: tuple[int, str, bool]) -> StepRecord:
    """A step with rows of (slot, request id, is_prefill)."""
    scheduled = tuple(ScheduledRequest(slot, name, 0, 0, 1, (), True, prefill) for slot, name, prefill in rows)
    stats = SchedulerStats(0, len(rows), 1, 0, 0)
    return StepRecord(0, 0.0, 0.0, 0.0, 0.0, scheduled, 0, 0, 0, 0, 0, (), (), (), True, stats)


def run_scheduler(policy: str, caps: tuple[int, ...], slots: int) -> list[StepRecord]:
    config = SchedulerConfig(
        num_blocks=64,
        block_size=4,
        max_model_len=64,
        vocab_size=50,
        max_num_seqs=slots,
        policy=policy,  # type: ignore[arg-type]
        max_wait_s=0.0,
        enable_prefix_cache=False,
        speculation="off",
    )
    scheduler, runner = Scheduler(config), FakeRunner(config)
    for index, cap in enumerate(caps):
        params = SamplingParams(temperature=0.0, max_tokens=cap, ignore_eos=True)
        scheduler.add(EngineRequest(f"r{index}", (1, 2, 3), params), 0.0)
    records = []
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        scheduler.update(output, runner.execute(output))
        rows = output.rows
        records.append(StepRecord(output.step, 0, 0, 0, 0, rows, 0, 0, 0, 0, 0, (), (), (), True, scheduler.stats()))
    return records


def text_of(timeline: Timeline, groups: dict[str, int], steps_per_column: float = 1.0) -> list[str]:
    return draw_terminal(timeline, groups, steps_per_column).plain.splitlines()


def test_consecutive_steps_of_one_kind_join_into_one_span() -> None:
    records = [
        record((0, "a", True)),
        record((0, "a", False), (1, "b", True)),
        record((0, "a", False), (1, "b", True)),
        record((1, "b", False), (0, "c", True)),
    ]
    timeline = timeline_of("t", records, num_slots=3)
    assert timeline.num_steps == 4
    assert timeline.spans == (
        Span(0, 0, 1, "a", 0, Work.PREFILL),
        Span(0, 1, 3, "a", 0, Work.DECODE),
        Span(0, 3, 4, "c", 0, Work.PREFILL),
        Span(1, 1, 3, "b", 0, Work.PREFILL),
        Span(1, 3, 4, "b", 0, Work.DECODE),
    )
    assert timeline.useful_share == pytest.approx(7 / 12)


def test_a_request_that_left_and_came_back_has_two_spans() -> None:
    records = [record((0, "a", False)), record((1, "b", False)), record((0, "a", False))]
    spans = [span for span in timeline_of("t", records, 2).spans if span.slot == 0]
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (2, 3)]


def test_a_slot_beyond_the_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 2 of 2"):
        timeline_of("t", [record((2, "a", True))], num_slots=2)


def test_terminal_picture_cell_by_cell() -> None:
    records = [record((0, "a", True)), record((0, "a", False), (1, "b", True)), record((0, "a", False))]
    lines = text_of(timeline_of("t", records, 3), {"a": 0, "b": 1})
    assert lines == ["slot  0 ▒▇▇", "slot  1 ·▒·", "slot  2 ···"]


def test_terminal_picture_shrinks_and_shows_half_filled_columns() -> None:
    spans = (
        Span(0, 0, 10, "a", 0, Work.DECODE),
        Span(1, 0, 1, "b", 0, Work.DECODE),
        Span(1, 6, 10, "b", 0, Work.WASTED),
    )
    assert text_of(Timeline("t", 2, 10, spans), {}, 5.0) == ["slot  0 ▇▇", "slot  1 ▃×"]


def test_terminal_picture_is_as_wide_as_it_was_asked_to_be() -> None:
    """80 steps over 70 columns: 80 / (80 / 70) is a little more than 70 in floating point."""
    spans = (Span(0, 0, 80, "a", 0, Work.DECODE),)
    assert text_of(Timeline("t", 1, 80, spans), {}, 80 / 70) == ["slot  0 " + "▇" * 70]


def test_terminal_picture_colours_by_group() -> None:
    text = draw_terminal(timeline_of("t", [record((0, "a", False), (1, "b", False))], 2), {"a": 2, "b": 5})
    styles = [str(span.style) for span in text.spans]
    assert PALETTE[2] in styles
    assert PALETTE[5] in styles


def test_terminal_picture_underlines_what_follows_a_grammar() -> None:
    free, bound = record((0, "a", False)), record((0, "b", False))
    bound = replace(bound, rows=tuple(row._replace(constrained=True) for row in bound.rows))
    text = draw_terminal(timeline_of("t", [free, bound], 1), {"a": 0, "b": 1})
    assert [str(span.style) for span in text.spans][-2:] == [PALETTE[0], f"{PALETTE[1]} underline"]


def test_static_batches_wait_and_continuous_ones_do_not() -> None:
    caps = (2, 6, 2, 6)
    static = timeline_of("static", run_scheduler("static", caps, slots=2), 2)
    continuous = timeline_of("continuous", run_scheduler("fcfs", caps, slots=2), 2)
    assert static.num_steps == 12
    assert text_of(static, {}) == ["slot  0 ▒▇····▒▇····", "slot  1 ▒▇▇▇▇▇▒▇▇▇▇▇"]
    assert continuous.num_steps == 10
    assert text_of(continuous, {}) == ["slot  0 ▒▇▒▇▒▇▇▇▇▇", "slot  1 ▒▇▇▇▇▇····"]
    assert static.useful_share == pytest.approx(16 / 24)


def test_png_is_written_and_holds_the_groups_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "timeline.png"
    records = [record((0, "a", False), (1, "b", False))] * 40
    draw_png(path, [timeline_of("one", records, 2), timeline_of("two", records[:20], 2)], {"a": 0, "b": 1}, ["A", "B"])
    pixels = imread(path)
    assert pixels.shape[1] > 1000

    def share(colour: str) -> float:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return float((abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).mean())

    assert share(PALETTE[0]) > 0.05
    assert share(PALETTE[1]) > 0.05
    assert share(PALETTE[2]) == 0.0
