"""The plan of one step: its rows, and the slots and blocks that they use.

The model runner receives `SchedulerOutput`: plain data, small and picklable. `StepPlan` builds it:
it counts tokens and adds rows, but makes no decisions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.request import Request
from serve_app.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole KV block before the step runs (a fork's copy-on-write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request that takes a slot, with all data for the runner.

    It was admitted, resumed or forked. `token_ids`: all known tokens (prompt, then output).
    `block_ids`: the whole block table as of this step.
    """

    slot: int
    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: tuple[int, ...]


class ScheduledRequest(NamedTuple):
    """One row of the packed step: tokens [start, start + num_tokens) of the request in `slot`.

    - `new_block_ids`: appended to the slot's block table before the step. Empty for a row with a
      `SlotStart`, which has the whole table.
    - `samples`: the row reaches the last known token, so its last position yields a new token.
    - `draft_token_ids`: drafts after the last known token, included in `num_tokens`. Each accepted
      draft yields one more token. Only rows that sample have drafts.
    - `token_in_flight`: the row's token, before any drafts, is sampled in the same slot by the
      previous, uncommitted step.
    - `waits`: the allowed tokens depend on that token, so the host must know it first.
    - `constrained`: a grammar limits the tokens.
    - `forced`: the grammar forces the drafts.
    """

    slot: int
    request_id: str
    choice: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    is_prefill: bool
    """True while prompt tokens, or known tokens after preemption or failover, are computed."""
    draft_token_ids: tuple[int, ...] = ()
    token_in_flight: bool = False
    waits: bool = False
    constrained: bool = False
    forced: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan.

    The runner applies slot starts, new blocks and block copies, then runs the rows.
    """

    step: int
    rows: tuple[ScheduledRequest, ...]
    slot_starts: tuple[SlotStart, ...]
    block_copies: tuple[BlockCopy, ...]
    num_tokens: int
    preempted: tuple[tuple[str, int], ...] = ()
    """(request id, choice) of the requests that lost their slot and blocks in this step."""
    admitted: tuple[tuple[str, int], ...] = ()
    gate_open: bool = True
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0
    """Tokens of the requests admitted in this step: found in the prefix cache, and looked up."""


@dataclass(slots=True)
class StepPlan:
    """A step being planned. `budget`: the number of tokens left."""

    budget: int
    rows: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sat_out: set[int] = field(default_factory=set)
    """Rows that will yield no token although they should; see `sit_out`."""
    slot_starts: list[SlotStart] = field(default_factory=list)
    preempted: list[tuple[str, int]] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    hit_tokens: int = 0
    queried_tokens: int = 0

    def add_row(self, request: Request, new_block_ids: tuple[int, ...] = ()) -> None:
        """Add a row with as many of the request's tokens as the budget allows."""
        start = request.num_computed_tokens + request.num_in_flight
        known = len(request.token_ids) + request.num_awaited
        num_tokens = known - start
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
                token_in_flight=request.num_awaited > 0,
                waits=request.num_awaited > 0 and request.params.needs_last_token,
                constrained=request.params.grammar is not None,
            )
        )
        request.num_in_flight += num_tokens
        request.num_awaited += samples
        self.budget -= num_tokens
        self.requests.append(request)

    def decodes(self) -> list[tuple[int, Request]]:
        """Return the rows that may have drafts, with their index.

        After a token in flight, only forced tokens can be drafted.
        """
        return [
            (index, request)
            for index, (row, request) in enumerate(zip(self.rows, self.requests, strict=True))
            if not row.is_prefill and not (row.token_in_flight and len(request.forced) < 2)
        ]

    def sit_out(self, index: int) -> None:
        """Mark a row that yields no token. Its last token is computed again, without drafts."""
        row, request = self.rows[index], self.requests[index]
        self.sat_out.add(index)
        request.sat_out = True
        request.num_in_flight -= 1 + len(row.draft_token_ids)
        request.num_awaited -= 1

    def end_row(self, index: int) -> None:
        """Record that the step has ended, so that the row's tokens are no longer in flight."""
        row, request, sat_out = self.rows[index], self.requests[index], index in self.sat_out
        request.sat_out = sat_out
        request.num_in_flight -= row.num_tokens - (1 + len(row.draft_token_ids) if sat_out else 0)
        request.num_awaited -= row.samples and not sat_out

    def add_drafts(self, index: int, new_block_ids: tuple[int, ...], drafts: tuple[int, ...]) -> None:
        """Add `drafts` after the row's last token."""
        row, request = self.rows[index], self.requests[index]
        self.rows[index] = row._replace(
            num_tokens=row.num_tokens + len(drafts),
            new_block_ids=row.new_block_ids + new_block_ids,
            draft_token_ids=drafts,
            forced=bool(request.forced),
        )
        request.num_in_flight += len(drafts)
        self.budget -= len(drafts)

    def add_prefills(self, running: Iterable[Request]) -> None:
        """Add rows for requests with uncomputed known tokens, in order, while the budget lasts."""
        for request in running:
            if self.budget == 0:
                return
            if request.is_prefilling:
                self.add_row(request)

    def add_start(self, request: Request) -> None:
        """Record that `request` has just taken its slot and blocks."""
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
        """Return the plan for the runner."""
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
