"""The scheduler's knobs and its decisions: who is next, when newcomers may enter, who is preempted, who speculates.

Decides nothing about blocks, tokens or slots: those are the scheduler's and the KV cache manager's.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from serve_app.errors import ConfigError

if TYPE_CHECKING:
    from serve_app.core.request import Request

_CHOICES = {
    "policy": ("fcfs", "priority", "static"),
    "prefill": ("fused", "separate"),
    "speculation": ("auto", "off"),
}
_MINIMA = {
    "num_blocks": 2,
    "block_size": 1,
    "max_model_len": 2,
    "vocab_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting_steps": 1,
}

LIVE_KNOBS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill",
    "waiting_served_ratio",
    "max_wait_s",
    "max_waiting_steps",
    "speculation",
)
"""What may change between two steps. The order of a queue and what the prefix cache knows may not."""
# Seats and the memory of the largest step are laid out when an engine is built: these may go down, and up again.
_MEASURED = ("max_num_seqs", "max_num_batched_tokens")

_SPECULATION_TOKENS = 6
"""Decode tokens of a step, drafts among them: with the 8-bit kernel the next one costs as much as a step of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerKnobs:
    """What users may turn. Construction raises ConfigError naming the key.

    max_num_seqs: sequences that run at once. max_num_batched_tokens bounds the tokens of one step. The gate's knobs
    (waiting_served_ratio, max_wait_s in seconds, max_waiting_steps) are explained at `AdmissionGate`.

    policy: fcfs = by arrival; priority = lower number first, then by arrival; static = by arrival, in closed batches,
    the baseline that continuous batching is compared with. prefill: fused = prefill chunks ride in the packed step;
    separate = while a group is admitted and prefilled, decodes pause; between two groups they compute a token at least.
    speculation: auto = tokens that a request's own text suggests are computed ahead while few requests run.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    policy: Literal["fcfs", "priority", "static"] = "fcfs"
    prefill: Literal["fused", "separate"] = "fused"
    waiting_served_ratio: float = 0.0
    max_wait_s: float = 1.0
    max_waiting_steps: int = 20
    enable_prefix_cache: bool = True
    speculation: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key in _CHOICES and value not in _CHOICES[key]:
                raise ConfigError(f"{key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
            if key in _MINIMA and (type(value) is not int or value < _MINIMA[key]):
                raise ConfigError(f"{key} must be an integer of at least {_MINIMA[key]}, got {value!r}")
            if field.type is float and not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key} must be a finite number of at least 0, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request computes a token in every step"
            )

    def knobs(self) -> dict[str, Any]:
        """The knobs alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulerKnobs)}

    def check_change(self, knobs: "SchedulerKnobs") -> None:
        """Raise `ConfigError` unless an engine that was built with `self` can go on with `knobs`."""
        changed = {key: value for key, value in knobs.knobs().items() if value != getattr(self, key)}
        for key, value in changed.items():
            if key not in LIVE_KNOBS:
                raise ConfigError(f"{key} cannot change in a running engine (live: {', '.join(LIVE_KNOBS)})")
            if key in _MEASURED and value > getattr(self, key):
                raise ConfigError(
                    f"{key} can be at most {getattr(self, key)} in this running engine, whose memory was measured "
                    f"with it, got {value}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerKnobs):
    """The knobs, and what the model and its memory set. Construction raises ConfigError naming the key.

    num_blocks counts the null block (block 0); block_size is in tokens and comes from the attention backend.
    vocab_size is the logits' width. token_cost: what one more token adds to a step of few, as a part of its time.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    token_cost: float = 0.1

    def __post_init__(self) -> None:
        SchedulerKnobs.__post_init__(self)  # not super(): `slots` makes a new class, which super() would not know
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"eos_token_ids holds {token_id}; the logits have ids 0 to {self.vocab_size - 1}")


class _OrderedQueue:
    """Requests by `order` (a heap), and by the time they came (an ordered dict); removal from anywhere is cheap.

    The heap keeps entries of removed requests until they surface or outnumber the living.
    """

    def __init__(self) -> None:
        self._members: OrderedDict[Request, None] = OrderedDict()
        self._heap: list[tuple[tuple[int, int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: "Request") -> bool:
        return request in self._members

    def push(self, request: "Request") -> None:
        self._members[request] = None
        heappush(self._heap, (request.order, request))

    def remove(self, request: "Request") -> None:
        del self._members[request]
        while self._heap and self._heap[0][1] not in self._members:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(member.order, member) for member in self._members]
            heapify(self._heap)

    def head(self) -> "Request | None":
        return self._heap[0][1] if self._heap else None

    def oldest(self) -> "Request | None":
        return next(iter(self._members), None)

    def newest(self) -> "Request | None":
        return next(reversed(self._members), None)

    def nth(self, n: int) -> "Request":
        """The `n`-th that came, counted from 1."""
        return next(islice(self._members, n - 1, n))


class RequestQueue:
    """Who waits, in order of service. Two queues, because only newcomers need the admission gate.

    Resuming requests (preempted ones, and further choices of a running request) have been let in before. By their
    order they are ahead of any newcomer of their priority: preemption takes the youngest, so they arrived earlier.
    """

    def __init__(self) -> None:
        self._new = _OrderedQueue()
        self._resuming = _OrderedQueue()

    def __len__(self) -> int:
        return len(self._new) + len(self._resuming)

    def __contains__(self, request: "Request") -> bool:
        return request in self._new or request in self._resuming

    @property
    def num_new(self) -> int:
        """Newcomers."""
        return len(self._new)

    @property
    def num_resuming(self) -> int:
        """Those who have been let in before."""
        return len(self._resuming)

    @property
    def new_head(self) -> "Request | None":
        """The newcomer who is next."""
        return self._new.head()

    @property
    def oldest_arrival(self) -> float:
        """When the newcomer who has waited longest came (infinity: nobody waits)."""
        oldest = self._new.oldest()
        return math.inf if oldest is None else oldest.arrived_at

    def last_arrival(self, limit: int) -> int:
        """The arrival number of the last newcomer to come, or of the `limit`-th where more wait (-1: nobody waits)."""
        last = self._new.nth(limit) if limit < len(self._new) else self._new.newest()
        return -1 if last is None else last.arrival

    def push(self, request: "Request", *, resuming: bool) -> None:
        """Enqueue by `request.order`."""
        (self._resuming if resuming else self._new).push(request)

    def remove(self, request: "Request") -> None:
        """Take out a request, wherever it stands."""
        (self._resuming if request in self._resuming else self._new).remove(request)

    def head(self, *, gate_open: bool) -> "Request | None":
        """Who is next: nobody overtakes the head, but a closed gate hides the newcomers."""
        resuming, new = self._resuming.head(), self.new_head if gate_open else None
        if resuming is None or new is None:
            return resuming or new
        return min(resuming, new, key=lambda request: request.order)


class AdmissionGate:
    """When newcomers may join the running requests. `waiting_served_ratio` = waiting / running.

    Open if any holds: nothing runs; the oldest newcomer has waited `max_wait_s`; `max_waiting_steps` steps passed since
    the last admission; waiting >= floor(running * waiting_served_ratio). With ratio 0 it is always open. It opens for
    the group that waits at that moment and stays open until the group is in, however many steps its prefill takes, or
    until seats or blocks end it. Who comes later is not of the group; once that is in, the gate is asked for them.

    Before all that, for the decodes that pause with `prefill: separate`: once anybody has started, no new group before
    they have had a step; after `max_num_seqs` starts, nobody at all. Nothing bypasses this, or load would starve them.

    Static policy: opens only when nothing runs or resumes, and `max_num_seqs` wait or the oldest has waited
    `max_wait_s`; the group is the batch.
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

    def next_in(self, now: float, queue: RequestQueue, running: int) -> "Request | None":
        """Who starts next. Behind a group that is in, the gate may open for another one in the same step."""
        head = queue.head(gate_open=self.is_open(queue))
        if head is None and queue.num_new and self.update(now, queue, running):
            head = queue.new_head
        return head

    def wake_at(self, queue: RequestQueue) -> float | None:
        """When time alone opens the gate of an idle engine; None where it is open anyway, or nobody waits."""
        if self._knobs.policy != "static" or queue.num_new == 0:
            return None
        return queue.oldest_arrival + self._knobs.max_wait_s

    def admitted(self) -> None:
        """A newcomer went in."""
        self._steps_since_admission = 0

    def started(self) -> None:
        """Anybody, newcomer or resuming, took a seat."""
        self._starts_since_decodes += 1

    def decodes_planned(self) -> None:
        """Everyone who can decode does so in this step (perhaps nobody can)."""
        self._starts_since_decodes = 0

    def close(self) -> None:
        """Seats or blocks have run out: the group ends here."""
        self._last_of_group = -1

    def step_done(self) -> None:
        """A step was planned."""
        self._steps_since_admission += 1


def pick_victim(running: "list[Request]") -> "Request":
    """Who is preempted: the youngest of the lowest priority. `running` is kept sorted by `order`."""
    return running[-1]


def max_drafts(knobs: SchedulerKnobs, num_decodes: int) -> int:
    """Draft tokens that each of so many decodes may have; together they take at most half of a step's tokens."""
    if knobs.speculation == "off" or num_decodes == 0:
        return 0
    return max(0, min(_SPECULATION_TOKENS, knobs.max_num_batched_tokens // 2) // num_decodes - 1)
