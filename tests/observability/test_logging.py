"""A request's line: JSON, one line whatever its fields hold, on the terminal with nothing before
it."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from serve_app.observability.logging import AdminLines, RequestLines, log_request, log_to_terminal

SUMMARY = {
    "request_id": "mine-1",
    "outcome": "completed",
    "error": None,
    "output_tokens": 4,
    "queue_s": 0.00123456,
    "seconds": 2.5,
    "started_at": 1_700_000_000.25,
    "replicas": ("alpha", "beta"),
}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    log_to_terminal()
    yield out
    for name in ("serve_app", "serve_app.requests"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


def test_a_line_is_one_json_object(terminal: io.StringIO) -> None:
    log_request(SUMMARY)
    line = json.loads(terminal.getvalue())
    assert datetime.fromisoformat(line.pop("time")).timestamp() == 1_700_000_002.75
    assert line == {
        "request_id": "mine-1",
        "outcome": "completed",
        "error": None,
        "output_tokens": 4,
        "queue_s": 0.0012,
        "seconds": 2.5,
        "replicas": ["alpha", "beta"],
    }


def test_no_field_can_begin_another_line(terminal: io.StringIO) -> None:
    evil = 'x"}\n{"time": "forged"}\r\n\x1b[31m\u2028%s'
    log_request({**SUMMARY, "request_id": evil})
    assert terminal.getvalue().count("\n") == 1
    assert "\x1b" not in terminal.getvalue()
    assert json.loads(terminal.getvalue())["request_id"] == evil


def test_other_records_keep_their_form(terminal: io.StringIO) -> None:
    logging.getLogger("serve_app.serving.replica").info("warming up")
    assert terminal.getvalue() == "INFO serve_app.serving.replica: warming up\n"


def test_a_storm_of_errors_is_logged_in_sums(terminal: io.StringIO) -> None:
    """Per error; whatever succeeds meanwhile has its line; and the next period begins anew."""
    timers: list[Callable[[], None]] = []
    lines = RequestLines(lambda _seconds, call: timers.append(call))
    for i in range(4000):
        lines({**SUMMARY, "outcome": "invalid", "error": "invalid_request_error"})
        if i % 1000 == 0:
            lines(SUMMARY)
            lines({**SUMMARY, "outcome": "overloaded", "error": "queue_full"})
    assert len(terminal.getvalue().splitlines()) == 20 + 4 + 4
    (end_of_period,) = timers
    end_of_period()
    total = json.loads(terminal.getvalue().splitlines()[-1])
    assert (total["error"], total["more"], total["seconds"]) == ("invalid_request_error", 3980, 10.0)
    assert len(terminal.getvalue().splitlines()) == 29
    lines({**SUMMARY, "error": "invalid_request_error"})
    assert (len(terminal.getvalue().splitlines()), len(timers)) == (30, 2)


def test_an_hour_has_one_line_for_each_path_that_an_admin_uses(terminal: io.StringIO) -> None:
    now = 0.0
    lines = AdminLines(lambda: now)
    for _ in range(3):
        lines("boss", "/metrics")
        lines("boss", "/debug/replicas")
        lines("other", "/metrics")
    now = 3600.0
    lines("boss", "/metrics")
    used = [json.loads(line) for line in terminal.getvalue().splitlines()]
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in used)
    assert [(line["admin_key"], line["path"]) for line in used] == [
        ("boss", "/metrics"),
        ("boss", "/debug/replicas"),
        ("other", "/metrics"),
        ("boss", "/metrics"),
    ]
