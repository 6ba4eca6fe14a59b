"""The audit log: what admins looked at, how keys changed."""

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serve_app.tenants.audit import AuditLog
from serve_app.tenants.key_file import WatchedKeyFile, add_key


class Clock:
    now = datetime(2026, 11, 30, 23, 30, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.now


def lines(folder: Path, month: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"audit-{month}.jsonl").read_text().splitlines()]


def test_an_hour_has_one_line_for_what_an_admin_looks_at(tmp_path: Path) -> None:
    clock = Clock()
    audit = AuditLog(tmp_path, clock)
    for _ in range(3):
        audit.accessed("boss", "/metrics")
        audit.accessed("boss", "/debug/replicas")
        audit.accessed("other", "/metrics")
    clock.now += 3600
    audit.accessed("boss", "/metrics")
    november, december = lines(tmp_path, "2026-11"), lines(tmp_path, "2026-12")
    assert [(line["key"], line["accessed"]) for line in november] == [
        ("boss", "/metrics"),
        ("boss", "/debug/replicas"),
        ("other", "/metrics"),
    ]
    assert december == [{"time": "2026-12-01T00:30:00.000+00:00", "key": "boss", "accessed": "/metrics"}]
    assert (tmp_path / "audit-2026-12.jsonl").stat().st_mode & 0o777 == 0o600


def test_changes_of_the_keys_are_kept_by_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    add_key(keys, "a", {})
    watched = WatchedKeyFile(keys, on_change=AuditLog(tmp_path, Clock()).keys_changed)
    key = add_key(keys, "b", {"admin": True})
    watched.refresh()
    assert [line["keys"] for line in lines(tmp_path, "2026-11")] == ["added b"]
    assert key not in (tmp_path / "audit-2026-11.jsonl").read_text()


def test_what_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AuditLog(tmp_path / "no folder", Clock()).accessed("boss", "/metrics")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "audit-2026-11.jsonl")
    AuditLog(tmp_path, Clock()).accessed("boss", "/metrics")
    assert "audit-2026-11.jsonl cannot be written: is not a regular file" in caplog.text
