"""Decides when waiting requests may join the running ones."""

import math

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import Request
from serve_app.core.request_queue import RequestQueue


class AdmissionGate:
    """Decides when new requests join the running ones. `waiting_served_ratio` = waiting / running.

    The gate is open if any of these holds: no request runs; the oldest new request has waited `max_wait_s`;
    `max_waiting_steps` steps have passed since the last admission; waiting >= floor(running * waiting_served_ratio).
    With ratio 0 it is always open. It opens for the group of requests that wait at that moment and stays open until
    the group is admitted, however many steps its prefill takes, or until slots or blocks run out. Requests that arrive
    later are not in the group; the gate decides about them afterwards.

    With `prefill: separate`, decodes pause during prefill. So after a start no new group is admitted before the decodes
    have had a step, and after `max_num_seqs` starts no request at all. There is no exception, or load would starve the
    decodes.

    Static policy: the gate opens only when no request runs or resumes, and `max_num_seqs` requests wait or the oldest
    has waited `max_wait_s`; the group is the batch.
    """

    def __init__(self, knobs: SchedulerKnobs) -> None:
        self._knobs = knobs
        self._steps_since_admission = 0
        self._last_of_group = -1
        self._starts_since_decodes = 0

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Use other knobs from now on. A group that is being admitted stays admitted."""
        self._knobs = knobs

    @property
    def decodes_are_due(self) -> bool:
        """Whether no request may start before the decodes have run, since a group or its forks may be long."""
        return self._starts_since_decodes >= self._knobs.max_num_seqs

    def is_open(self, queue: RequestQueue) -> bool:
        """Whether the next new request may start in this step, because it belongs to the group."""
        head = queue.new_head
        return head is not None and head.arrival <= self._last_of_group

    def update(self, now: float, queue: RequestQueue, running: int) -> bool:
        """Update the gate before the next admission; returns whether it is open (also when no request waits)."""
        if self.is_open(queue):
            return True
        decodes_wait = self._knobs.prefill == "separate" and self._starts_since_decodes > 0
        opens = not decodes_wait and self._opens(now, queue, running)
        limit = self._knobs.max_num_seqs if self._knobs.policy == "static" else queue.num_new
        self._last_of_group = queue.last_arrival(limit) if opens else -1
        return opens

    def _opens(self, now: float, queue: RequestQueue, running: int) -> bool:
        knobs = self._knobs
        overdue = now >= queue.oldest_arrival + knobs.max_wait_s
        if knobs.policy == "static":
            return running == 0 and queue.num_resuming == 0 and (overdue or queue.num_new >= knobs.max_num_seqs)
        return (
            running == 0
            or overdue
            or self._steps_since_admission >= knobs.max_waiting_steps
            or len(queue) >= math.floor(running * knobs.waiting_served_ratio)
        )

    def next_in(self, now: float, queue: RequestQueue, running: int) -> Request | None:
        """The request that starts next, if any. After a whole group, the gate may open for another in the same step."""
        head = queue.head(gate_open=self.is_open(queue))
        if head is None and queue.num_new and self.update(now, queue, running):
            head = queue.new_head
        return head

    def admitted(self) -> None:
        """A new request was admitted."""
        self._steps_since_admission = 0

    def started(self) -> None:
        """A request, new or resuming, took a slot."""
        self._starts_since_decodes += 1

    def decodes_planned(self) -> None:
        """Every request that can decode (perhaps none) does so in this step."""
        self._starts_since_decodes = 0

    def close(self) -> None:
        """Slots or blocks have run out: the group ends here."""
        self._last_of_group = -1

    def step_done(self) -> None:
        """A step was planned."""
        self._steps_since_admission += 1
