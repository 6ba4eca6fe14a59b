"""The plan of one step while `Scheduler.schedule` draws it up. Decides nothing: it counts tokens and writes rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.core.output import BlockCopy, ScheduledRequest, SchedulerOutput, SlotStart
from serve_app.core.request import Request


@dataclass(slots=True)
class StepPlan:
    """A step in the making; `budget` is what is left of its tokens."""

    budget: int
    rows: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    slot_starts: list[SlotStart] = field(default_factory=list)
    preempted: list[tuple[str, int]] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    hit_tokens: int = 0
    queried_tokens: int = 0

    def add_row(self, request: Request, new_block_ids: tuple[int, ...] = (), drafts: tuple[int, ...] = ()) -> None:
        """Let `request` compute as many of its tokens as the budget allows; or its last one, and `drafts` behind it."""
        start = request.num_computed_tokens + request.num_in_flight
        known = len(request.token_ids) + request.num_awaited
        num_tokens = known + len(drafts) - start
        if num_tokens > self.budget:
            num_tokens = self.budget
        samples = start + num_tokens >= known
        self.rows.append(
            ScheduledRequest(
                request.slot,
                request.request_id,
                request.choice,
                start,
                num_tokens,
                new_block_ids,
                samples,
                start < request.num_prefill_tokens,
                drafts,
                request.num_awaited > 0,
            )
        )
        request.num_in_flight += num_tokens
        request.num_awaited += samples
        self.budget -= num_tokens
        self.requests.append(request)

    def add_prefills(self, running: Iterable[Request]) -> None:
        """Let those whose known tokens are not all computed go on, in their order, while the budget lasts."""
        for request in running:
            if self.budget == 0:
                return
            if request.is_prefilling:
                self.add_row(request)

    def add_start(self, request: Request) -> None:
        """`request` has just taken its slot and its blocks."""
        self.admitted.append((request.request_id, request.choice))
        self.slot_starts.append(
            SlotStart(
                slot=request.slot,
                request_id=request.request_id,
                choice=request.choice,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                block_ids=tuple(block.id for block in request.blocks),
            )
        )

    def finish(self, step: int, block_copies: tuple[BlockCopy, ...], gate_open: bool) -> SchedulerOutput:
        """The plan as the runner gets it."""
        return SchedulerOutput(
            step=step,
            rows=tuple(self.rows),
            slot_starts=tuple(self.slot_starts),
            block_copies=block_copies,
            num_tokens=sum(row.num_tokens for row in self.rows),
            preempted=tuple(self.preempted),
            admitted=tuple(self.admitted),
            gate_open=gate_open,
            prefix_hit_tokens=self.hit_tokens,
            prefix_queried_tokens=self.queried_tokens,
        )
