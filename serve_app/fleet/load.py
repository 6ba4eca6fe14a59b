"""A replica's load from its heartbeats. Used by routing and the watchdog."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load at `at` (monotonic seconds of this process).

    Sequences and blocks are counts. `step`: the number of the last finished engine step.
    `step_age_s`: how long the current step has been running; None if the engine is idle.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    step: int
    step_age_s: float | None
    at: float
