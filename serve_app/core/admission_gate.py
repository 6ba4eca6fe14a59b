"""Decides when waiting requests may join the running ones."""

import math

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import Request
from serve_app.core.request_queue import RequestQueue


class AdmissionGate:
    """Decides when new requests join the running ones. `waiting_served_ratio` = waiting / running.

    The gate is open if at least one of these conditions holds:

    - No request runs.
    - The oldest new request has waited `max_wait_s`.
    - `max_waiting_steps` steps have passed since the last admission.
    - waiting >= floor(running * waiting_served_ratio). With ratio 0 this always holds.

    The gate opens for the group of requests that wait at that moment. It stays open until the group
    is admitted, however many steps its prefill takes, or until slots or blocks run out. Requests
    that arrive later are not in the group; the gate decides about them afterwards.

    With `prefill: separate`, decodes pause during prefill. So after a start, no new group is
    admitted before the decodes have had a step, and after `max_num_seqs` starts no request at all.
    This has no exception, because load would then starve the decodes.
    """

    def __init__(self, knobs: SchedulerKnobs) -> None:
        self._knobs = knobs
        self._steps_since_admission = 0
        self._last_of_group = -1
        self._starts_since_decodes = 0

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Change the knobs. A group that is being admitted stays admitted."""
        self._knobs = knobs

    @property
    def decodes_are_due(self) -> bool:
        """Whether decodes must run before another request starts.

        A group, or its forks, may be long.
        """
        return self._starts_since_decodes >= self._knobs.max_num_seqs

    def is_open(self, queue: RequestQueue) -> bool:
        """Whether the next new request may start in this step, because it belongs to the group."""
        head = queue.new_head
        return head is not None and head.arrival <= self._last_of_group

    def update(self, now: float, queue: RequestQueue, running: int) -> bool:
        """Update the gate before the next admission.

        Returns whether it is open, even if no request waits.
        """
        if self.is_open(queue):
            return True
        decodes_wait = self._knobs.prefill == "separate" and self._starts_since_decodes > 0
        opens = not decodes_wait and self._opens(now, queue, running)
        self._last_of_group = queue.last_arrival(self._max_group(queue)) if opens else -1
        return opens

    def wake_time(self, queue: RequestQueue) -> float | None:
        """Return when the gate opens by time alone; None if it does not."""
        return None

    def _max_group(self, queue: RequestQueue) -> int:
        return queue.num_new

    def _opens(self, now: float, queue: RequestQueue, running: int) -> bool:
        knobs = self._knobs
        return (
            running == 0
            or self._is_overdue(now, queue)
            or self._steps_since_admission >= knobs.max_waiting_steps
            or len(queue) >= math.floor(running * knobs.waiting_served_ratio)
        )

    def _is_overdue(self, now: float, queue: RequestQueue) -> bool:
        return now >= queue.oldest_arrival + self._knobs.max_wait_s

    def next_in(self, now: float, queue: RequestQueue, running: int) -> Request | None:
        """Return the request that starts next, if any.

        After a whole group, the gate may open for another group in the same step.
        """
        head = queue.head(gate_open=self.is_open(queue))
        if head is None and queue.num_new and self.update(now, queue, running):
            head = queue.new_head
        return head

    def admitted(self) -> None:
        """Record that a new request was admitted."""
        self._steps_since_admission = 0

    def started(self) -> None:
        """Record that a new or resuming request took a slot."""
        self._starts_since_decodes += 1

    def decodes_planned(self) -> None:
        """Record that every request that can decode (perhaps none) does so in this step."""
        self._starts_since_decodes = 0

    def close(self) -> None:
        """End the group, because slots or blocks have run out."""
        self._last_of_group = -1

    def step_done(self) -> None:
        """Record that a step was planned."""
        self._steps_since_admission += 1


class StaticGate(AdmissionGate):
    """Opens only if nothing runs or resumes, and enough requests wait.

    Enough: `max_num_seqs` requests, or the oldest has waited `max_wait_s`. The group is the batch:
    it runs to its end before the next one starts. In the literature, these two knobs are called
    max_batch_size and max_wait_time.
    """

    def wake_time(self, queue: RequestQueue) -> float | None:
        """Return when the oldest new request has waited `max_wait_s`; None if there is none."""
        return queue.oldest_arrival + self._knobs.max_wait_s if queue.num_new else None

    def _max_group(self, queue: RequestQueue) -> int:
        return self._knobs.max_num_seqs

    def _opens(self, now: float, queue: RequestQueue, running: int) -> bool:
        is_full = queue.num_new >= self._knobs.max_num_seqs
        return running == 0 and queue.num_resuming == 0 and (is_full or self._is_overdue(now, queue))


def make_gate(knobs: SchedulerKnobs) -> AdmissionGate:
    """Return the gate for the knobs' policy."""
    return StaticGate(knobs) if knobs.policy == "static" else AdmissionGate(knobs)
