"""`serve-app usage`: the ledger's sums."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.tenants.ledger import Ledger, Spent

SPENT = Spent("a", "tiny", "fp", "id", "chat", "completed", 10, 4, 7, 5, 0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    days = [datetime(2026, 11, day, tzinfo=UTC).timestamp() for day in (22, 23)]
    for now in days:
        ledger = Ledger(tmp_path, lambda now=now: now)  # type: ignore[misc]
        for spent in (SPENT, replace(SPENT, key="b", output_tokens=1_000), replace(SPENT, outcome="cancelled")):
            ledger.write(spent)
    return tmp_path


def rows(folder: Path, *words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["usage", str(folder), "--json", *words])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_sums_by_key_and_day(folder: Path) -> None:
    both = ["--since", "2026-11-22", "--until", "2026-11-23"]
    sums = [list(row.values()) for row in rows(folder, *both)]
    assert sums == [["a", 4, 40, 16, 28, 20], ["b", 2, 20, 8, 2_000, 10]]
    names = ["key", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"]
    assert list(rows(folder, *both)[0]) == names
    by_day = rows(folder, *both, "--by", "day,outcome")
    assert [(row["day"], row["outcome"], row["requests"]) for row in by_day] == [
        ("2026-11-22", "cancelled", 1),
        ("2026-11-22", "completed", 2),
        ("2026-11-23", "cancelled", 1),
        ("2026-11-23", "completed", 2),
    ]
    assert rows(folder, "--since", "2026-11-23", "--until", "2026-11-23", "--by", "model")[0]["requests"] == 3
    assert rows(folder, "--since", "2020-01-01", "--until", "2020-01-02") == []


def test_the_table_and_what_is_refused(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["usage", str(folder), "--since", "2026-11-22", "--until", "2026-11-23"])
    assert "2,000" in shown.output
    refused = CliRunner().invoke(app, ["usage", str(folder), "--by", "colour"])
    assert refused.exit_code == 2
    assert "'colour' is not one of" in refused.output


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "usage-2026-11-24.jsonl").mkdir()
    days = ["--since", "2026-11-22", "--until", "2026-11-24"]
    result = CliRunner().invoke(app, ["usage", str(folder), *days])
    assert result.exit_code == 1
    assert "usage-2026-11-24.jsonl: is not a regular file" in result.output


def test_sums_that_were_carried_count_as_their_requests(folder: Path) -> None:
    line = {"key": "a", "requests": 5, "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 2}
    with (folder / "usage-2026-11-23.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    only = ["--since", "2026-11-23", "--until", "2026-11-23", "--by", "key,model"]
    assert [row["requests"] for row in rows(folder, *only)] == [5, 2, 1]
