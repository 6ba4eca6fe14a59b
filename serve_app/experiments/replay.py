"""The live scheduler under arrivals, in a time that passes as steps of the real model cost.

Nothing is computed: which tokens a model says does not matter to who waits for whom. The scheduler is the engine's own;
the ways to batch are its settings, and what padding adds to a step is priced like anything else that is computed. So
all ways have the same kernels, and what differs is batching alone. KV memory is never short here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.results import ModelRunnerOutput
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_plan import ScheduledRequest, SchedulerOutput
from serve_app.experiments.step_costs import StepCost, pairs_of
from serve_app.workloads.arrivals import Arrival

_BLOCK_SIZE = 16
_TOKEN, _VOCAB_SIZE = 5, 8


class Way(StrEnum):
    """How requests are batched; the values are the keys of the JSON reports."""

    PADDED_STATIC = "padded_static"
    PACKED_STATIC = "packed_static"
    PADDED_CONTINUOUS = "padded_continuous"
    PACKED_CONTINUOUS = "packed_continuous"


_KNOBS: dict[Way, dict[str, Any]] = {
    # A batch is whoever waits when the one before has ended.
    Way.PADDED_STATIC: {"policy": "static", "max_wait_s": 0.0},
    Way.PACKED_STATIC: {"policy": "static", "max_wait_s": 0.0},
    # Newcomers are a batch of their own before they are merged, and the others pause.
    Way.PADDED_CONTINUOUS: {"prefill": "separate"},
    Way.PACKED_CONTINUOUS: {},
}


@dataclass(slots=True)
class Served:
    """One request: when the step began that it entered in, and when each of its tokens came; seconds."""

    arrival: Arrival
    slot: int = -1
    started_s: float = 0.0
    token_s: list[float] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """From its arrival to the beginning of its first step."""
        return self.started_s - self.arrival.at_s

    @property
    def first_token_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_s[0] - self.arrival.at_s

    @property
    def latency_s(self) -> float:
        """From its arrival to its last token."""
        return self.token_s[-1] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive tokens."""
        return [after - before for before, after in pairwise(self.token_s)]


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step: its time, how many requests entered, and whether it read prompts only, so that the others paused."""

    begin_s: float
    end_s: float
    admitted: int
    only_prompts: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of the arrivals, in their order."""

    requests: list[Served]
    steps: list[ReplayedStep]

    @property
    def busy_s(self) -> float:
        """Seconds of computing."""
        return sum(step.end_s - step.begin_s for step in self.steps)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(len(request.token_s) for request in self.requests)


def replay(way: Way, arrivals: Sequence[Arrival], cost: StepCost, slots: int, **knobs: Any) -> Replay:
    """Serve the arrivals, which are in order of time. `knobs` are those of `SchedulerKnobs`. Unless they say
    how many tokens a step may have, it takes any prompts whole.
    """
    scheduler = Scheduler(_config(arrivals, {"max_num_seqs": slots, **_KNOBS[way], **knobs}))
    price = _price_of(way)
    served = {f"request-{index}": Served(arrival) for index, arrival in enumerate(arrivals)}
    names = list(served)
    steps: list[ReplayedStep] = []
    now, arrived, started = 0.0, 0, 0
    while arrived < len(names) or scheduler.has_unfinished:
        while arrived < len(names) and arrivals[arrived].at_s <= now:
            scheduler.add(_request(names[arrived], arrivals[arrived]), arrivals[arrived].at_s)
            arrived += 1
        output = scheduler.schedule(now)
        if not output.rows:
            # Nothing happens before somebody arrives, or the oldest who waits has waited long enough.
            moments = [arrival.at_s for arrival in arrivals[arrived : arrived + 1]]
            moments += [
                arrival.at_s + scheduler.config.max_wait_s for arrival in arrivals[started : min(arrived, started + 1)]
            ]
            now = min(moments)
            continue
        begin_s, now = now, now + cost.seconds(*price(output.rows))
        for start in output.slot_starts:
            served[start.request_id].slot, served[start.request_id].started_s = start.slot, begin_s
        started += len(output.admitted)
        only_prompts = all(row.is_prefill for row in output.rows)
        steps.append(ReplayedStep(begin_s, now, len(output.admitted), only_prompts))
        for delta in scheduler.update(output, _tokens(output)):
            served[delta.request_id].token_s += [now] * len(delta.token_ids)
    return Replay(list(served.values()), steps)


def capacity(arrivals: Iterable[Arrival], cost: StepCost, slots: int, **knobs: Any) -> float:
    """Requests per second that packed continuous batching completes when all of them wait from the beginning on."""
    waiting = [Arrival(0.0, one.prompt_tokens, one.output_tokens) for one in arrivals]
    return len(waiting) / replay(Way.PACKED_CONTINUOUS, waiting, cost, slots, **knobs).busy_s


def _config(arrivals: Sequence[Arrival], knobs: dict[str, Any]) -> SchedulerConfig:
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
    all_prompts = knobs["max_num_seqs"] * max(arrival.prompt_tokens for arrival in arrivals)
    return SchedulerConfig(
        num_blocks=(knobs["max_num_seqs"] + 1) * (longest // _BLOCK_SIZE + 2),
        block_size=_BLOCK_SIZE,
        max_model_len=longest + 1,
        vocab_size=_VOCAB_SIZE,
        **{"enable_prefix_cache": False, "speculation": "off", "max_num_batched_tokens": all_prompts, **knobs},
    )


def _request(name: str, arrival: Arrival) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
    return EngineRequest(name, (_TOKEN,) * arrival.prompt_tokens, params)


def _tokens(output: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(tuple((_TOKEN,) if row.samples else () for row in output.rows))


_Price = Callable[[Sequence[ScheduledRequest]], tuple[int, int]]
"""Positions that a step of these rows computes, and pairs of query and key."""


def _price_of(way: Way) -> _Price:
    if way is Way.PADDED_STATIC:
        return _StaticBatch().price
    return _padded if way is Way.PADDED_CONTINUOUS else _packed


def _packed(rows: Sequence[ScheduledRequest]) -> tuple[int, int]:
    return sum(row.num_tokens for row in rows), sum(pairs_of(row.start, row.num_tokens) for row in rows)


def _padded(rows: Sequence[ScheduledRequest]) -> tuple[int, int]:
    """Every row is as wide as the widest; without a kernel that skips it, padding is multiplied like the rest."""
    columns = max(row.num_tokens for row in rows)
    positions = len(rows) * columns
    return positions, positions * max(row.start + row.num_tokens for row in rows)


@dataclass(slots=True)
class _StaticBatch:
    """Rows that have ended are computed on, and keep their columns, until the last one ends."""

    rows: int = 0
    width: int = 0

    def price(self, rows: Sequence[ScheduledRequest]) -> tuple[int, int]:
        columns = max(row.num_tokens for row in rows)
        if rows[0].is_prefill:
            self.rows, self.width = len(rows), columns
        else:
            self.width += columns
        positions = self.rows * columns
        return positions, positions * self.width
