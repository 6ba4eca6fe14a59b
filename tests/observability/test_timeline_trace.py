"""The trace tells what the records tell: every token on the right track at the right time, every
event once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from serve_app.observability.step_ring import Recording, ended_at
from serve_app.observability.timeline_trace import FIRST_SLOT, GATE, STEPS, attempt_of, chrome_trace
from tests.observability.recordings import record_run


@pytest.fixture(scope="module")
def recording() -> Recording:
    names = ("one.1", "two.1", "three.2")
    return record_run((9, 3, 5), (6, 12, 4), names, max_num_batched_tokens=6, num_blocks=6)


def events(recording: Recording, phase: str, tid: int | None = None) -> list[dict[str, Any]]:
    found = chrome_trace([recording])["traceEvents"]
    return [event for event in found if event["ph"] == phase and tid in (None, event["tid"])]


def test_slots_hold_every_computed_token(recording: Recording) -> None:
    told: Counter[tuple[int, str, str]] = Counter()
    for event in events(recording, "X"):
        if event["tid"] >= FIRST_SLOT:
            slot, work = event["tid"] - FIRST_SLOT, event["name"].split()[0]
            told[slot, event["args"]["request"], work] += event["args"]["tokens"]
    computed: Counter[tuple[int, str, str]] = Counter()
    for record in recording.records:
        for row in record.rows:
            computed[row.slot, row.request_id, "prefill" if row.is_prefill else "decode"] += row.num_tokens
    assert told == computed


def test_spans_of_a_slot_do_not_overlap_and_end_with_their_steps(recording: Recording) -> None:
    ends = {round((ended_at(record) - 100.0) * 1e6) for record in recording.records}
    for slot in range(recording.num_slots):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events(recording, "X", FIRST_SLOT + slot))
        assert spans
        assert all(before[1] <= after[0] + 0.2 for before, after in zip(spans, spans[1:], strict=False))
        assert {round(stop) for _, stop in spans} <= ends


def test_each_prefill_chunk_is_a_span_and_decodes_in_a_row_are_one(recording: Recording) -> None:
    chunks = sum(row.is_prefill for record in recording.records for row in record.rows)
    spans = [event for event in events(recording, "X") if event["tid"] >= FIRST_SLOT]
    assert sum(event["name"].startswith("prefill") for event in spans) == chunks > 3
    decodes = [event for event in spans if event["name"].startswith("decode")]
    assert len(decodes) < sum(not row.is_prefill for record in recording.records for row in record.rows) / 2


def test_marks(recording: Recording) -> None:
    marks = Counter(event["name"] for event in events(recording, "i", STEPS))
    records = recording.records
    admitted = sum(len(record.admitted) for record in records)
    moved = sum(name == "three.2" for record in records for name, _ in record.admitted)
    assert moved > 0
    assert marks["moved here"] == moved
    assert marks["admitted"] == admitted - moved
    assert marks["preempted"] == sum(len(record.preempted) for record in records) > 0
    assert marks["finished"] == 3


def test_the_gate_is_one_span_per_position(recording: Recording) -> None:
    shut = [replace(record, gate_open=not 3 <= i < 5) for i, record in enumerate(recording.records)]
    spans = events(replace(recording, records=tuple(shut)), "X", GATE)
    assert [span["name"] for span in spans] == ["open", "closed", "open"]
    assert spans[1]["dur"] == pytest.approx(20_000, abs=1)


def test_idle_time_is_in_no_span(recording: Recording) -> None:
    """Nobody decoded through a pause: the runs before and after it are two spans."""
    records = recording.records
    later = [replace(r, started_at=r.started_at + 5) for r in records[6:]]
    paused = replace(recording, records=(*records[:6], *later))
    for event in events(paused, "X"):
        assert event["dur"] < 1e6


def test_replicas_are_processes_on_one_clock(recording: Recording) -> None:
    later = replace(
        recording, replica="beta", records=tuple(replace(r, started_at=r.started_at + 2) for r in recording.records)
    )
    trace = chrome_trace([recording, later])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "replica alpha", 2: "replica beta"}
    first = {pid: min(e["ts"] for e in trace["traceEvents"] if e["pid"] == pid and "ts" in e) for pid in names}
    assert first == {1: 0.0, 2: pytest.approx(2e6)}
    assert trace["otherData"]["start_unix_s"] == recording.records[0].started_at


def test_no_steps_no_spans(recording: Recording) -> None:
    trace = chrome_trace([replace(recording, records=())])
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}


@pytest.mark.parametrize(("name", "attempt"), [("a.1", 1), ("a.3", 3), ("a", 1), ("7", 1), ("a.b", 1), ("", 1)])
def test_attempt_numbers(name: str, attempt: int) -> None:
    assert attempt_of(name) == attempt
