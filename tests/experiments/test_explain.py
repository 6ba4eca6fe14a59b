"""`serve-app explain`: the step is a real one, and the picture says exactly what it computed."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.experiments.packed_step import PackedStep, Segment, draw_mask, draw_mask_png, draw_row, packed_step


def record(*rows: ScheduledRequest) -> StepRecord:
    stats = SchedulerStats(0, len(rows), 1, 0, 0)
    return StepRecord(7, 0.0, 0.0, 0.0, 0.0, rows, 0, 0, 0, 0, 0, (), (), (), True, stats)


@pytest.fixture
def step() -> PackedStep:
    """A decodes its third token; B reads prompt tokens 1 and 2 of 4, the first being in the cache
    already."""
    rows = (
        ScheduledRequest(0, "A", 0, 2, 1, (), True, False),
        ScheduledRequest(1, "B", 0, 1, 2, (), False, True),
    )
    texts = {10: "x", 11: " y", 12: "\n", 20: "p", 21: " q", 22: "$r", 23: "s"}
    return packed_step(record(*rows), {"A": [10, 11, 12], "B": [20, 21, 22, 23]}, texts)


def test_segments_own_their_part_of_the_row(step: PackedStep) -> None:
    assert step.step == 7
    assert step.segments == (
        Segment("A", 0, 0, 2, (12,), ("\n",), is_prefill=False, samples=True),
        Segment("B", 1, 1, 1, (21, 22), (" q", "$r"), is_prefill=True, samples=False),
    )


def test_the_mask_cell_by_cell(step: PackedStep) -> None:
    assert draw_mask(step).plain.splitlines() == [
        "                    A   B   ",
        "  0 A ⏎             ▓▓█ ··· ",
        "  1 B ␣q            ··· ▓█░ ",
        "  2 B $r            ··· ▓██ ",
    ]


def test_the_row_in_words(step: PackedStep) -> None:
    output = StringIO()
    Console(file=output, width=200).print(draw_row(step))
    lines = [line.split("│") for line in output.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line[1:-1]] for line in lines] == [
        ["A", "0", "2", "decodes: feeds its newest token, which attends to all 3 of its tokens", "⏎"],
        [
            "B",
            "1..2",
            "1..2",
            "prefill: computes 2 prompt tokens at once, after 1 that earlier steps computed; the rest follows later",
            "␣q$r",
        ],
    ]


def test_as_data(step: PackedStep) -> None:
    data = step.to_json()
    assert (data["num_tokens"], data["num_prefill_tokens"], data["num_decode_tokens"]) == (3, 2, 1)
    assert data["segments"][1] == {
        "request_id": "B",
        "slot": 1,
        "kind": "prefill",
        "row": [1, 3],
        "positions": [1, 3],
        "token_ids": [21, 22],
        "tokens": [" q", "$r"],
        "attends_to": [[0, 2], [0, 3]],
        "samples": False,
    }


def test_png_is_drawn(step: PackedStep, tmp_path: Path) -> None:
    draw_mask_png(tmp_path / "mask.png", step)
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_missing_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="tokens of A that are unknown"):
        packed_step(record(ScheduledRequest(0, "A", 0, 2, 1, (), True, False)), {"A": [1, 2]}, {1: "a", 2: "b"})


def test_the_command_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    """One token per character, so the step holds two decodes, one whole prompt and a part of
    another."""
    png, json_file = tmp_path / "mask.png", tmp_path / "step.json"
    options = [
        "--model",
        str(tiny_folder),
        "--budget",
        "60",
        "--kv-cache-gib",
        "0.02",
        "--png",
        str(png),
        "--json",
        str(json_file),
    ]
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    data = json.loads(json_file.read_text())
    assert [segment["kind"] for segment in data["segments"]] == ["decode", "decode", "prefill", "prefill"]
    assert data["num_tokens"] == 60
    assert data["segments"][2]["tokens"] == list("Water boils at a temperature of")
    assert [segment["samples"] for segment in data["segments"]] == [True, True, True, False]
    row_end = 0
    for segment in data["segments"]:
        assert segment["row"][0] == row_end
        row_end = segment["row"][1]
        assert segment["attends_to"] == [[0, position + 1] for position in range(*segment["positions"])]
    assert "2 decode tokens" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("step", "number", "kinds"),
    [
        ("first", 0, ["prefill", "prefill"]),
        ("0", 0, ["prefill", "prefill"]),
        ("1", 1, ["decode", "decode"]),
        ("mixed", 2, ["decode", "decode", "prefill", "prefill"]),
        ("4", 4, ["decode", "decode", "decode", "decode"]),
    ],
)
def test_any_step_of_the_run(tiny_folder: Path, tmp_path: Path, step: str, number: int, kinds: list[str]) -> None:
    json_file = tmp_path / "step.json"
    options = ["--model", str(tiny_folder), "--budget", "60", "--kv-cache-gib", "0.02", "--step", step]
    result = CliRunner().invoke(app, ["explain", *options, "--json", str(json_file)])
    assert result.exit_code == 0, result.output
    data = json.loads(json_file.read_text())
    assert data["step"] == number
    assert [segment["kind"] for segment in data["segments"]] == kinds


def test_a_step_that_the_run_does_not_have(tiny_folder: Path) -> None:
    options = ["--model", str(tiny_folder), "--budget", "60", "--kv-cache-gib", "0.02", "--step", "99"]
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 1
    assert "step 99 does not exist; the run has steps 0 to" in result.output
    result = CliRunner().invoke(app, ["explain", "--step", "last"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'last' is not first, mixed or a number" in result.output


def test_a_missing_model_is_told_in_one_line() -> None:
    result = CliRunner().invoke(app, ["explain", "--model", "/no/such/folder"])
    assert result.exit_code == 1
    assert "/no/such/folder" in result.output


def test_a_budget_smaller_than_the_slots_is_refused_before_anything_is_loaded() -> None:
    result = CliRunner().invoke(app, ["explain", "--model", "/no/such/folder", "--budget", "7"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'--budget'" in result.output
