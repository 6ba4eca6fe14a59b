"""A request's line: JSON, one line whatever its fields hold, on the terminal with nothing before it."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from serve_app.observability.logging import log_request, log_to_terminal

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
