"""Recorded steps in Chrome's trace event format, for https://ui.perfetto.dev and chrome://tracing.

Defines the tracks. Each replica is a process; its threads are the steps, the admission gate and the
slots; its counters are queue, batch tokens and KV blocks. Format: "Trace Event Format", Google,
2016 (times in microseconds).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import StepRecord
from serve_app.observability.step_ring import Recording, ended_at

STEPS, GATE, FIRST_SLOT = 1, 2, 3
"""Thread ids. Slot s is thread FIRST_SLOT + s."""

_IDLE_S = 0.03
"""A longer pause between two steps is idle time and belongs to no span."""
_ATTEMPT_SEPARATOR = "."


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the trace as plain data. Time 0 is the start of the earliest step."""
    starts = [recording.records[0].started_at for recording in recordings if recording.records]
    origin = min(starts, default=0.0)
    events = [event for pid, recording in enumerate(recordings, 1) for event in _replica(pid, recording, origin)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": origin}}


def attempt_of(request_id: str) -> int:
    """Return the attempt's number: 1 is the first; higher ones followed a failover."""
    number = request_id.rpartition(_ATTEMPT_SEPARATOR)[2]
    return int(number) if number.isdecimal() and _ATTEMPT_SEPARATOR in request_id else 1


@dataclass(slots=True)
class _Span:
    """One slot's work for one choice, from its first step's start to its last step's end."""

    row: ScheduledRequest
    first: StepRecord
    last: StepRecord
    tokens: int

    def goes_on(self, row: ScheduledRequest, record: StepRecord) -> bool:
        mine = (self.row.request_id, self.row.choice, self.row.is_prefill)
        same = not row.is_prefill and mine == (row.request_id, row.choice, False)
        return same and _follows(record, self.last)


def _follows(record: StepRecord, before: StepRecord) -> bool:
    """Whether `record` directly followed `before`."""
    return record.step == before.step + 1 and record.started_at - ended_at(before) <= _IDLE_S


def _replica(pid: int, recording: Recording, origin: float) -> Iterator[dict[str, Any]]:
    names = {STEPS: "steps", GATE: "admission gate"}
    names |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(recording.num_slots)}
    yield _metadata(pid, 0, "process_name", {"name": f"replica {recording.replica}"})
    for tid, name in names.items():
        yield _metadata(pid, tid, "thread_name", {"name": name})
        yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})
    clock = _Clock(pid, origin)
    for record in recording.records:
        yield from _step(clock, record)
    yield from _gate(clock, recording.records)
    yield from _slots(clock, recording.records)


@dataclass(frozen=True, slots=True)
class _Clock:
    """Creates events of one process, with times relative to `origin`."""

    pid: int
    origin: float

    def span(self, tid: int, name: str, start: float, stop: float, **args: Any) -> dict[str, Any]:
        duration = round((stop - start) * 1e6, 1)
        return self._event("X", tid, name, start, {"dur": duration, "args": args})

    def mark(self, tid: int, name: str, at: float, **args: Any) -> dict[str, Any]:
        return self._event("i", tid, name, at, {"s": "t", "args": args})

    def counter(self, name: str, at: float, **values: float) -> dict[str, Any]:
        return self._event("C", 0, name, at, {"args": values})

    def _event(self, phase: str, tid: int, name: str, at: float, more: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": phase,
            "pid": self.pid,
            "tid": tid,
            "name": name,
            "ts": round((at - self.origin) * 1e6, 1),
            **more,
        }


def _metadata(pid: int, tid: int, kind: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _step(clock: _Clock, record: StepRecord) -> Iterator[dict[str, Any]]:
    start, stop, stats = record.started_at, ended_at(record), record.stats
    yield clock.span(
        STEPS,
        f"step {record.step}",
        start,
        stop,
        rows=len(record.rows),
        prefill_tokens=record.num_prefill_tokens,
        decode_tokens=record.num_decode_tokens,
        output_tokens=record.num_output_tokens,
        prefix_hit_tokens=record.prefix_hit_tokens,
        schedule_ms=round(record.schedule_s * 1e3, 3),
        model_ms=round(record.model_s * 1e3, 3),
        update_ms=round(record.update_s * 1e3, 3),
    )
    yield clock.counter("requests", start, running=stats.running, waiting=stats.waiting)
    yield clock.counter("batch tokens", start, prefill=record.num_prefill_tokens, decode=record.num_decode_tokens)
    # Reset the counter, which would otherwise keep its value during idle time.
    yield clock.counter("batch tokens", stop, prefill=0, decode=0)
    yield clock.counter("KV blocks", stop, used=stats.blocks_used, cached=stats.blocks_cached)
    for request_id, choice in record.admitted:
        kind = "moved here" if attempt_of(request_id) > 1 else "admitted"
        yield clock.mark(STEPS, kind, start, request=request_id, choice=choice)
    for request_id, choice in record.preempted:
        yield clock.mark(STEPS, "preempted", start, request=request_id, choice=choice)
    for request_id, choice, reason in record.finished:
        yield clock.mark(STEPS, "finished", stop, request=request_id, choice=choice, reason=reason)


def _gate(clock: _Clock, records: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """Yield a span for each run of steps with the gate in one state."""
    first: StepRecord | None = None
    last: StepRecord | None = None
    for record in records:
        if first is None or last is None or record.gate_open != first.gate_open or not _follows(record, last):
            if first is not None and last is not None:
                yield _gate_span(clock, first, last)
            first = record
        last = record
    if first is not None and last is not None:
        yield _gate_span(clock, first, last)


def _gate_span(clock: _Clock, first: StepRecord, last: StepRecord) -> dict[str, Any]:
    return clock.span(GATE, "open" if first.gate_open else "closed", first.started_at, ended_at(last))


def _slots(clock: _Clock, records: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    running: dict[int, _Span] = {}
    for record in records:
        for row in record.rows:
            span = running.get(row.slot)
            if span is not None and span.goes_on(row, record):
                span.last = record
                span.tokens += row.num_tokens
                continue
            if span is not None:
                yield _slot_span(clock, span)
            running[row.slot] = _Span(row, record, record, row.num_tokens)
    for span in running.values():
        yield _slot_span(clock, span)


def _slot_span(clock: _Clock, span: _Span) -> dict[str, Any]:
    row = span.row
    return clock.span(
        FIRST_SLOT + row.slot,
        f"{'prefill' if row.is_prefill else 'decode'} {row.request_id[:8]}",
        span.first.started_at,
        ended_at(span.last),
        request=row.request_id,
        choice=row.choice,
        first_token=row.start,
        tokens=span.tokens,
        constrained=row.constrained,
        steps=[span.first.step, span.last.step],
    )
