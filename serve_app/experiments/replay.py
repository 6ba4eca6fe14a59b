"""Runs the real scheduler on arrivals in simulated time, which advances by the cost of the real
model's steps.

No model runs: scheduling does not depend on which tokens are generated. The ways to batch are
settings of the engine's own scheduler, and padding costs the same as other computed positions. So
all ways use the same kernels, and only batching differs. KV memory is never short here.
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
    """The ways to batch. The values are keys of the JSON reports."""

    PADDED_STATIC = "padded_static"
    PACKED_STATIC = "packed_static"
    PADDED_CONTINUOUS = "padded_continuous"
    PACKED_CONTINUOUS = "packed_continuous"


_KNOBS: dict[Way, dict[str, Any]] = {
    # A batch takes all requests waiting when the previous batch has ended.
    Way.PADDED_STATIC: {"policy": "static", "max_wait_s": 0.0},
    Way.PACKED_STATIC: {"policy": "static", "max_wait_s": 0.0},
    # New requests form a separate batch before they are merged, while the others pause.
    Way.PADDED_CONTINUOUS: {"prefill": "separate"},
    Way.PACKED_CONTINUOUS: {},
}


@dataclass(slots=True)
class Served:
    """One request, with the start time of its first step and the time of each token; in seconds."""

    arrival: Arrival
    slot: int = -1
    started_s: float = 0.0
    token_s: list[float] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """Time from arrival to the start of the first step."""
        return self.started_s - self.arrival.at_s

    @property
    def first_token_s(self) -> float:
        """Time from arrival to the first token."""
        return self.token_s[0] - self.arrival.at_s

    @property
    def latency_s(self) -> float:
        """Time from arrival to the last token."""
        return self.token_s[-1] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive tokens."""
        return [after - before for before, after in pairwise(self.token_s)]


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step: its times, the number of admitted requests, and whether it had only prompts, so
    that other requests paused.
    """

    begin_s: float
    end_s: float
    admitted: int
    only_prompts: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """Results of the arrivals, in the same order."""

    requests: list[Served]
    steps: list[ReplayedStep]

    @property
    def busy_s(self) -> float:
        """Seconds of computing."""
        return sum(step.end_s - step.begin_s for step in self.steps)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(request.token_s) for request in self.requests)


def replay(way: Way, arrivals: Sequence[Arrival], cost: StepCost, slots: int, **knobs: Any) -> Replay:
    """Serve the arrivals, which must be sorted by time. `knobs`: settings of `SchedulerKnobs`. By
    default a step has room for the whole prompts of all slots.
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
            # Nothing happens until the next arrival, or until the oldest waiting request reaches
            # max_wait_s.
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
    """Return the requests per second of packed continuous batching when all requests wait from the
    start.
    """
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
"""Returns the positions that a step of these rows computes, and its pairs of query and key."""


def _price_of(way: Way) -> _Price:
    if way is Way.PADDED_STATIC:
        return _StaticBatch().price
    return _padded if way is Way.PADDED_CONTINUOUS else _packed


def _packed(rows: Sequence[ScheduledRequest]) -> tuple[int, int]:
    return sum(row.num_tokens for row in rows), sum(pairs_of(row.start, row.num_tokens) for row in rows)


def _padded(rows: Sequence[ScheduledRequest]) -> tuple[int, int]:
    """Price a padded step. Every row is as wide as the widest; without a kernel that skips padding,
    it costs the same as tokens.
    """
    columns = max(row.num_tokens for row in rows)
    positions = len(rows) * columns
    return positions, positions * max(row.start + row.num_tokens for row in rows)


@dataclass(slots=True)
class _StaticBatch:
    """Prices static batches. Finished rows keep their columns and are still computed until the last
    one ends.
    """

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
