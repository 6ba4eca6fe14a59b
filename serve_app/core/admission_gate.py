"""When waiting requests may join the running ones."""

import math

from serve_app.core.config import SchedulerKnobs
from serve_app.core.request import Request
from serve_app.core.request_queue import RequestQueue


class AdmissionGate:
    """When newcomers may join the running requests. `waiting_served_ratio` = waiting / running.

    Open if any holds: nothing runs; the oldest newcomer has waited `max_wait_s`; `max_waiting_steps` steps passed since
    the last admission; waiting >= floor(running * waiting_served_ratio). With ratio 0 it is always open. It opens for
    the group that waits at that moment and stays open until the group is in, however many steps its prefill takes, or
    until slots or blocks run out. Who comes later is not of the group; once that is in, the gate is asked for them.

    Before all that, for the decodes that pause with `prefill: separate`: once anybody has started, no new group before
    they have had a step; after `max_num_seqs` starts, nobody at all. Nothing bypasses this, or load would starve them.
    """

    def __init__(self, knobs: SchedulerKnobs) -> None:
        self._knobs = knobs
        self._steps_since_admission = 0
        self._last_of_group = -1
        self._starts_since_decodes = 0

    def reconfigure(self, knobs: SchedulerKnobs) -> None:
        """Decide by other knobs from now on. A group that is going in goes on."""
        self._knobs = knobs

    @property
    def decodes_are_due(self) -> bool:
        """Whether nobody at all may start before decodes have run: a group, or the forks of one, may be long."""
        return self._starts_since_decodes >= self._knobs.max_num_seqs

    def is_open(self, queue: RequestQueue) -> bool:
        """Whether the next newcomer may enter in this step: it belongs to the group."""
        head = queue.new_head
        return head is not None and head.arrival <= self._last_of_group

    def update(self, now: float, queue: RequestQueue, running: int) -> bool:
        """Look at the state before the next admission; returns whether the gate is open (also when nobody waits)."""
        if self.is_open(queue):
            return True
        decodes_wait = self._knobs.prefill == "separate" and self._starts_since_decodes > 0
        opens = not decodes_wait and self._opens(now, queue, running)
        self._last_of_group = queue.last_arrival(self._max_group(queue)) if opens else -1
        return opens

    def wake_time(self, queue: RequestQueue) -> float | None:
        """When the gate opens by itself for those who wait while nothing runs; None: it does not need time for that."""
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
        """Who starts next. Behind a group that is in, the gate may open for another one in the same step."""
        head = queue.head(gate_open=self.is_open(queue))
        if head is None and queue.num_new and self.update(now, queue, running):
            head = queue.new_head
        return head

    def admitted(self) -> None:
        """A newcomer went in."""
        self._steps_since_admission = 0

    def started(self) -> None:
        """A request, new or resuming, took a slot."""
        self._starts_since_decodes += 1

    def decodes_planned(self) -> None:
        """Everyone who can decode does so in this step (perhaps nobody can)."""
        self._starts_since_decodes = 0

    def close(self) -> None:
        """Slots or blocks have run out: the group ends here."""
        self._last_of_group = -1

    def step_done(self) -> None:
        """A step was planned."""
        self._steps_since_admission += 1


class StaticGate(AdmissionGate):
    """Opens only when nothing runs or resumes, and `max_num_seqs` wait or the oldest has waited `max_wait_s`.

    The group is the batch: it runs to its end before the next one starts. These two knobs are what the literature calls
    max_batch_size and max_wait_time.
    """

    def wake_time(self, queue: RequestQueue) -> float | None:
        """When the oldest has waited `max_wait_s`; None where nobody new waits."""
        return queue.oldest_arrival + self._knobs.max_wait_s if queue.num_new else None

    def _max_group(self, queue: RequestQueue) -> int:
        return self._knobs.max_num_seqs

    def _opens(self, now: float, queue: RequestQueue, running: int) -> bool:
        is_full = queue.num_new >= self._knobs.max_num_seqs
        return running == 0 and queue.num_resuming == 0 and (is_full or self._is_overdue(now, queue))


def make_gate(knobs: SchedulerKnobs) -> AdmissionGate:
    """The gate of the knobs' policy."""
    return StaticGate(knobs) if knobs.policy == "static" else AdmissionGate(knobs)
