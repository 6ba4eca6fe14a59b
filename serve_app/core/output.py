"""What crosses the border between scheduler, model runner and whoever listens. Plain data, small, picklable.

What every row of every step makes one of is a named tuple, which takes a third of the time of a frozen dataclass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from serve_app.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a choice ended. STOP: end of sequence or a stop token id (stop *strings* are found at the ingress)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole KV block before the step runs (a fork's copy-on-write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request takes a slot (admitted, resumed or forked): everything the runner must know about it from now on.

    `token_ids` are all tokens known so far (prompt, then output); `block_ids` is the whole block table as of this step.
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

    `new_block_ids` are appended to the slot's block table before the step (empty for a row with a `SlotStart`, which
    carries its whole table). `samples`: the row reaches the last known token, so its last position yields a new one.

    `draft_token_ids`: guesses of what follows the last known token, the last of the row's `num_tokens`. After each of
    them the row yields one more token if the guess is what was sampled before it; only rows that sample have any.
    `token_in_flight`: the row's token is what the step before it, not yet committed, samples in the same slot.
    """

    slot: int
    request_id: str
    choice: int
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...]
    samples: bool
    is_prefill: bool
    """True while prompt (or, after preemption or failover, already known) tokens are being computed."""
    draft_token_ids: tuple[int, ...] = ()
    token_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan. The runner applies: slot starts, new blocks, block copies, then runs the rows in order."""

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
    """Tokens of the requests admitted in this step: found in the prefix cache, and looked for."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token under the model's own distribution (before penalties, bias, temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely alternatives as (token id, logprob), best first; as many as the request asked for."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the step produced, by row index of `SchedulerOutput.rows`.

    `token_ids[i]` is empty for a row that did not sample; for one that did, the accepted drafts and one token more.
    `failed[i]` is a message: that request, and no other, ends
    with an error. `prompt_logprobs[i]` holds one entry for each *next* prompt token that the row's positions predict.
    """

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class TokenDelta(NamedTuple):
    """News of one choice of one request after a step.

    `offset` counts the output tokens before these, prior ones (failover) included, so a reader can drop doubles.
    `num_cached_tokens` (prompt tokens found computed: in the prefix cache, or by a sibling choice) is set on the first
    delta of a choice. `prompt_logprobs` come with choice 0, all of them before or with its first output token, each
    once; after a failover from the start again, but only if no output token of choice 0 had come.
    `error` accompanies `FinishReason.ERROR`.
    """

    request_id: str
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: str | None = None


def join_deltas(deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
    """The same news of one request, which follow on each other, as one delta per choice."""
    by_choice: dict[int, list[TokenDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [_join(parts) if len(parts) > 1 else parts[0] for parts in by_choice.values()]


def _join(parts: list[TokenDelta]) -> TokenDelta:
    first, last = parts[0], parts[-1]
    return TokenDelta(
        first.request_id,
        first.choice,
        first.offset,
        tuple(chain.from_iterable([part.token_ids for part in parts])),
        tuple(chain.from_iterable([part.logprobs for part in parts])),
        tuple(chain.from_iterable([part.prompt_logprobs for part in parts])),
        last.finish_reason,
        first.num_cached_tokens,
        last.error,
    )


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's state between steps."""

    waiting: int
    running: int
    blocks_total: int
    """Usable blocks: the null block is not counted."""
    blocks_used: int
    blocks_cached: int
    """Free blocks that still hold a published prefix."""

    @property
    def waiting_served_ratio(self) -> float:
        """Waiting requests per running one: waiting / max(running, 1)."""
        return self.waiting / max(self.running, 1)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything worth knowing about one finished step; metrics, timeline, `compare` and `explain` read only this.

    Times are seconds; `started_at` is on the clock that the engine passes to `schedule(now)`.
    `stats` is the state right after the step.
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
    """Draft tokens among the decode tokens, and how many of them were what the model would have said."""
    num_bytes: int = 0
    num_flops: int = 0
    """What the step had at least to read, and to multiply and add; see `ModelCost`."""
