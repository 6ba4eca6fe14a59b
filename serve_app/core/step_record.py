"""The record of a finished step, and the scheduler's state between steps."""

from dataclasses import dataclass

from serve_app.core.results import FinishReason
from serve_app.core.step_plan import ScheduledRequest


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's state between steps."""

    waiting: int
    running: int
    blocks_total: int
    """Usable blocks, without the null block."""
    blocks_used: int
    blocks_cached: int
    """Free blocks that still contain a published prefix."""

    @property
    def waiting_served_ratio(self) -> float:
        """Waiting requests per running one: waiting / max(running, 1)."""
        return self.waiting / max(self.running, 1)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything about one finished step.

    Metrics, timeline, `compare` and `explain` read only this. Times are in seconds. `started_at` is
    on the clock that the engine passes to `schedule(now)`. `stats` is the state right after the
    step.
    """

    step: int
    started_at: float
    schedule_s: float
    model_s: float
    update_s: float
    rows: tuple[ScheduledRequest, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    prefix_hit_tokens: int
    prefix_queried_tokens: int
    preempted: tuple[tuple[str, int], ...]
    admitted: tuple[tuple[str, int], ...]
    finished: tuple[tuple[str, int, FinishReason], ...]
    gate_open: bool
    stats: SchedulerStats
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens among the decode tokens, and how many of them the model accepted."""
    num_forced_tokens: int = 0
    """Accepted draft tokens that a grammar forced."""
    mask_s: float = 0.0
    """CPU time of grammar masks, in a separate thread."""
    num_bytes: int = 0
    num_flops: int = 0
    """Minimum bytes read, and multiplications plus additions, of the step; see `ModelCost`."""
