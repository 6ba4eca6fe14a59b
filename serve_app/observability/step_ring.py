"""Keeps the last steps of one engine, the source of the timeline and the console.

Decides how many steps are kept and how they are serialized. Recording costs the engine one append:
the ring keeps the `StepRecord`s themselves, and readers do all other work.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Any, Self

import orjson

from serve_app.core.results import FinishReason
from serve_app.core.step_plan import ScheduledRequest
from serve_app.core.step_record import SchedulerStats, StepRecord

MAX_STEPS, MAX_ROWS = 4096, 65_536
"""Limits of a ring: about 15 MB when it is full of rows."""


class StepRing:
    """The newest steps: at most `max_steps`, with at most `max_rows` rows in total. Thread-safe."""

    def __init__(self, max_steps: int = MAX_STEPS, max_rows: int = MAX_ROWS) -> None:
        self._records: deque[StepRecord] = deque()
        self._max_steps, self._max_rows, self._rows = max_steps, max_rows, 0
        self._lock = Lock()

    def append(self, record: StepRecord) -> None:
        """Add a step and drop the oldest ones beyond the limits. The newest is always kept."""
        records = self._records
        with self._lock:
            records.append(record)
            self._rows += len(record.rows)
            while len(records) > 1 and (len(records) > self._max_steps or self._rows > self._max_rows):
                self._rows -= len(records.popleft().rows)

    def since(self, moment: float) -> list[StepRecord]:
        """Return the steps that ended after `moment` (on the engine's clock), oldest first."""
        found = []
        with self._lock:
            for record in reversed(self._records):
                if ended_at(record) <= moment:
                    break
                found.append(record)
        found.reverse()
        return found


def ended_at(record: StepRecord) -> float:
    """Return when the step ended, on the clock of its `started_at`."""
    return record.started_at + record.schedule_s + record.model_s + record.update_s


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps from a replica's ring, and its current state. Moments are Unix seconds."""

    replica: str
    now: float
    num_slots: int
    block_size: int
    stats: SchedulerStats
    step_age_s: float | None
    """How long the current step has been running; None while nothing runs."""
    records: tuple[StepRecord, ...]

    def to_json(self) -> bytes:
        """Serialize the fields, with rows as arrays.

        A row has the first fields of `ScheduledRequest` without its blocks, then `constrained`.
        """
        return orjson.dumps({**_fields(self), "stats": asdict(self.stats), "records": [*map(_pack, self.records)]})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build a recording from parsed `to_json` output.

        Raises `KeyError`, `TypeError` or `ValueError` for invalid data.
        """
        return cls(
            **{
                **data,
                "stats": SchedulerStats(**data["stats"]),
                "records": tuple(_unpack(record) for record in data["records"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Recorder:
    """A replica's ring, and the other sources of its recordings."""

    replica: str
    num_slots: int
    block_size: int
    stats: Callable[[], SchedulerStats]
    step_age_s: Callable[[], float | None]
    ring: StepRing

    def recording(self, seconds: float) -> Recording:
        """Return the steps that ended in the last `seconds` seconds.

        Times are converted to Unix time, so that they can be compared between machines.
        """
        now, monotonic = time.time(), time.monotonic()
        records = self.ring.since(monotonic - seconds)
        return Recording(
            replica=self.replica,
            now=now,
            num_slots=self.num_slots,
            block_size=self.block_size,
            stats=self.stats(),
            step_age_s=self.step_age_s(),
            records=tuple(replace(record, started_at=record.started_at + now - monotonic) for record in records),
        )


def _fields(data: Any) -> dict[str, Any]:
    return {name: getattr(data, name) for name in data.__dataclass_fields__}


def _pack(record: StepRecord) -> dict[str, Any]:
    rows = [
        (r.slot, r.request_id, r.choice, r.start, r.num_tokens, r.samples, r.is_prefill, r.constrained)
        for r in record.rows
    ]
    return {**_fields(record), "rows": rows, "stats": asdict(record.stats)}


def _unpack(data: Mapping[str, Any]) -> StepRecord:
    rows = tuple(
        ScheduledRequest(slot, request_id, choice, start, num_tokens, (), samples, is_prefill, constrained=constrained)
        for slot, request_id, choice, start, num_tokens, samples, is_prefill, constrained in data["rows"]
    )
    return StepRecord(
        **{
            **data,
            "rows": rows,
            "preempted": tuple((name, choice) for name, choice in data["preempted"]),
            "admitted": tuple((name, choice) for name, choice in data["admitted"]),
            "finished": tuple((name, choice, FinishReason(reason)) for name, choice, reason in data["finished"]),
            "stats": SchedulerStats(**data["stats"]),
        }
    )
