"""The ring keeps the newest steps within its bounds; recordings survive the wire."""

import threading
from dataclasses import replace

import orjson
import pytest

from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import StepRecord
from serve_app.observability.step_ring import Recorder, Recording, StepRing, ended_at
from tests.observability.recordings import record_run


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record_run(prompts=(9, 3, 5), caps=(6, 12, 4), max_num_batched_tokens=6, num_blocks=6)


def steps(ring: StepRing) -> list[int]:
    return [record.step for record in ring.since(-1.0)]


def numbered(record: StepRecord, count: int) -> list[StepRecord]:
    return [replace(record, step=i, started_at=float(i)) for i in range(count)]


def test_the_oldest_steps_make_room(recording: Recording) -> None:
    ring = StepRing(max_steps=3)
    for record in numbered(recording.records[0], 7):
        ring.append(record)
    assert steps(ring) == [4, 5, 6]


def test_rows_bound_the_ring_too_but_the_newest_step_stays(recording: Recording) -> None:
    row = recording.records[0].rows[0]
    wide = replace(recording.records[0], rows=(row,) * 4)
    ring = StepRing(max_rows=10)
    for record in numbered(wide, 5):
        ring.append(record)
    assert steps(ring) == [3, 4]
    ring.append(replace(wide, step=9, rows=(row,) * 50, started_at=9.0))
    assert steps(ring) == [9]


def test_since_counts_a_step_by_its_end(recording: Recording) -> None:
    ring = StepRing()
    for record in recording.records:
        ring.append(record)
    third = recording.records[2]
    assert ring.since(ended_at(third))[0] is recording.records[3]
    assert ring.since(ended_at(third) - 1e-6)[0] is third
    assert ring.since(1e9) == []


def test_reading_while_the_engine_writes(recording: Recording) -> None:
    """Every reading is a run of consecutive steps, whatever the writer does meanwhile."""
    ring = StepRing(max_steps=50)
    records = numbered(recording.records[0], 5000)
    writer = threading.Thread(target=lambda: [ring.append(record) for record in records])
    writer.start()
    while writer.is_alive():
        read = steps(ring)
        assert read == list(range(read[0], read[0] + len(read))) if read else True
    writer.join()
    assert steps(ring) == list(range(4950, 5000))


def test_a_recording_survives_the_wire_all_but_its_blocks(recording: Recording) -> None:
    assert any(record.preempted for record in recording.records)
    assert any(record.finished for record in recording.records)
    rows = tuple(row._replace(constrained=True) for row in recording.records[0].rows)
    recording = replace(recording, records=(replace(recording.records[0], rows=rows), *recording.records[1:]))
    back = Recording.from_json(orjson.loads(recording.to_json()))
    assert back == replace(
        recording,
        records=tuple(
            replace(record, rows=tuple(row._replace(new_block_ids=()) for row in record.rows))
            for record in recording.records
        ),
    )
    assert all(isinstance(row, ScheduledRequest) for record in back.records for row in record.rows)


def test_a_recorder_tells_unix_time(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = StepRing()
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    for moment in (900.0, 995.0, 999.0):
        ring.append(replace(recording.records[0], started_at=moment))
    recorder = Recorder("alpha", 2, 4, lambda: recording.stats, lambda: 0.25, ring)
    told = recorder.recording(10.0)
    assert [record.started_at for record in told.records] == [1_699_999_995.0, 1_699_999_999.0]
    assert (told.now, told.step_age_s, told.replica) == (1_700_000_000.0, 0.25, "alpha")
