"""`serve-app experiment memory`: what is reserved follows from the recorded steps, and pages
reserve the least."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.core.results import FinishReason
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.experiments.memory import MemoryRun, Usage, Way, draw, run, usages
from serve_app.experiments.requests import make_job
from serve_app.text.tokenizer import Tokenizer

SLOTS, CAP = 4, 96


def record(rows: dict[str, tuple[int, int]], finished: str = "", preempted: str = "", blocks: int = 0) -> StepRecord:
    """rows: request to start and number of tokens; finished, preempted: one letter for each
    request."""
    scheduled = tuple(ScheduledRequest(i, name, 0, *rows[name], (), True, False) for i, name in enumerate(rows))
    ended = tuple((name, 0, FinishReason.LENGTH) for name in finished)
    stats = SchedulerStats(0, len(rows), 100, blocks, 0)
    lost = tuple((name, 0) for name in preempted)
    return StepRecord(0, 0.0, 0.0, 0.0, 0.0, scheduled, 0, 0, 0, 0, 0, lost, (), ended, True, stats)


RECORDS = [
    record({"a": (0, 5), "b": (0, 3)}, blocks=3),
    record({"a": (5, 1), "b": (3, 1)}, finished="a", blocks=1),
    record({"b": (4, 1)}, finished="b"),
    record({"c": (0, 2)}, blocks=1),
]


@pytest.mark.parametrize(
    ("way", "reserved"),
    [(Way.STATIC, [20, 20, 20, 10]), (Way.CONTIGUOUS, [20, 20, 10, 10]), (Way.PAGED, [12, 12, 8, 4])],
)
def test_reservations_step_by_step(way: Way, reserved: list[int]) -> None:
    """A context of 10, blocks of 4. b's row of the static batch outlives a; a page table ends with
    its request."""
    result = usages(way, RECORDS, context=10, block_size=4)
    assert [usage.reserved for usage in result] == reserved
    assert [usage.used for usage in result] == [8, 10, 5, 2]
    assert [usage.running for usage in result] == [2, 2, 1, 1]


def test_a_preempted_request_uses_nothing() -> None:
    records = [record({"a": (0, 5), "b": (0, 3)}, blocks=3), record({"a": (5, 1)}, preempted="b", blocks=2)]
    assert [usage.used for usage in usages(Way.PAGED, records, 10, 4)] == [8, 6]


@pytest.fixture(scope="module")
def results(tiny_folder: Path, tokenizer: Tokenizer) -> dict[Way, MemoryRun]:
    job = make_job(tokenizer, 16, CAP, SLOTS, model=str(tiny_folder), device="cpu", num_threads=1)
    return run(job, most_running=16)


def test_all_have_the_same_memory_and_stay_within_it(results: dict[Way, MemoryRun]) -> None:
    assert len({result.total for result in results.values()}) == 1
    for result in results.values():
        assert all(0 < usage.used <= usage.reserved <= result.total for usage in result.usages)


def test_each_idea_wastes_less(results: dict[Way, MemoryRun]) -> None:
    figures = {way: result.report() for way, result in results.items()}
    static, contiguous, paged = (figures[way]["used_share_of_reserved"] for way in Way)
    assert static < contiguous < paged
    assert figures[Way.CONTIGUOUS]["most_running"] == SLOTS < figures[Way.PAGED]["most_running"]
    assert figures[Way.STATIC]["steps"] > figures[Way.CONTIGUOUS]["steps"] > figures[Way.PAGED]["steps"]


def test_picture_of_no_waste_at_all(tmp_path: Path) -> None:
    draw(tmp_path / "memory.png", {way: MemoryRun((Usage(4, 4, 1),), 4, 2**20) for way in Way})
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    png, json_file = tmp_path / "memory.png", tmp_path / "memory.json"
    options = ["--model", str(tiny_folder), "--requests", "8", "--cap", "24", "--slots", "2", "--threads", "1"]
    result = CliRunner().invoke(app, ["experiment", "memory", *options, "--png", str(png), "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(json_file.read_text())
    assert list(figures) == [way.value for way in Way]
    assert all(len(figures[way]["reserved_positions"]) == figures[way]["steps"] for way in Way)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_missing_model_is_told_in_one_line() -> None:
    result = CliRunner().invoke(app, ["experiment", "memory", "--model", "/no/such/folder"])
    assert result.exit_code == 1
    assert "/no/such/folder" in result.output
