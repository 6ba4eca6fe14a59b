"""How full a replica is, as its heartbeats say. Routing and the watchdog read it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How full a replica was at `at` (monotonic seconds of this process). Sequences and blocks are counts.

    `step` is the number of the engine's last finished step; `step_age_s` how long the current one has been running,
    None when there is nothing to run.
    """

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    step: int
    step_age_s: float | None
    at: float
