"""A fleet in virtual time: real schedulers and prefix caches, and steps that take as long as they
have tokens."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.results import ModelRunnerOutput, TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_plan import SchedulerOutput
from serve_app.fleet.prefix_routing import PrefixRouting
from serve_app.fleet.routing_policy import Placement, ReplicaInfo, RoutingRequest

SECONDS_PER_STEP, SECONDS_PER_TOKEN = 0.02, 0.0025
CONFIG = SchedulerConfig(num_blocks=1400, block_size=16, max_model_len=4096, vocab_size=1000)


def prefix_groups(rng: Random, groups: int = 24, each: int = 4, shared: int = 512, own: int = 32) -> list[list[int]]:
    """`groups` prefixes with `each` prompts, shuffled."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(CONFIG.vocab_size) for _ in range(count)]

    prefixes = [ids(shared) for _ in range(groups)]
    prompts = [prefix + ids(own) for prefix in prefixes for _ in range(each)]
    rng.shuffle(prompts)
    return prompts


class Chooser:
    """Where a prompt goes; told what became of it."""

    def choose(self, attempt_id: str, prompt: Sequence[int], in_flight: dict[str, int]) -> str:
        raise NotImplementedError

    def started(self, attempt_id: str, num_cached_tokens: int) -> None:
        pass

    def ended(self, attempt_id: str) -> None:
        pass


@dataclass
class PowerOfTwo(Chooser):
    """The less busy of two at random."""

    rng: Random

    def choose(self, attempt_id: str, prompt: Sequence[int], in_flight: dict[str, int]) -> str:
        return min(self.rng.sample(list(in_flight), 2), key=in_flight.__getitem__)


class Ours(Chooser):
    def __init__(self, names: Sequence[str]) -> None:
        self._policy = PrefixRouting()
        info = ReplicaInfo(CONFIG.block_size, CONFIG.num_blocks, CONFIG.max_num_seqs)
        self._policy.update(dict.fromkeys(names, info))
        self._placements: dict[str, Placement] = {}

    def choose(self, attempt_id: str, prompt: Sequence[int], in_flight: dict[str, int]) -> str:
        request = RoutingRequest(prompt, len(prompt))
        best = self._policy.rank(request, in_flight, {}, 0.0)[0]
        self._placements[attempt_id] = self._policy.place(request, best)
        return best

    def started(self, attempt_id: str, num_cached_tokens: int) -> None:
        self._placements[attempt_id].started(num_cached_tokens)

    def ended(self, attempt_id: str) -> None:
        self._placements.pop(attempt_id).ended()


@dataclass
class SimulatedFleet:
    """Serves `prompts` with `concurrency` of them out at once."""

    names: Sequence[str]
    chooser: Chooser
    output_tokens: int = 8
    cached_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._schedulers = {name: Scheduler(CONFIG) for name in self.names}
        self._in_flight = dict.fromkeys(self.names, 0)
        self._running: dict[str, SchedulerOutput] = {}
        self._events: list[tuple[float, str]] = []
        self._sent_at: dict[str, float] = {}

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def mean_ttft_s(self) -> float:
        return mean(self.ttft_s.values())

    def serve(self, prompts: Sequence[Sequence[int]], concurrency: int) -> None:
        waiting = list(enumerate(prompts))[::-1]

        def send_next() -> None:
            if waiting:
                number, prompt = waiting.pop()
                self._send(str(number), prompt)

        for _ in range(concurrency):
            send_next()
        while self._events:
            self.seconds, name = heapq.heappop(self._events)
            output = self._running.pop(name)
            result = ModelRunnerOutput(token_ids=[(7,) if row.samples else () for row in output.rows])
            for delta in self._schedulers[name].update(output, result):
                self._note(name, delta, send_next)
            self._step(name)
        assert len(self.ttft_s) == len(prompts)

    def _send(self, attempt_id: str, prompt: Sequence[int]) -> None:
        name = self.chooser.choose(attempt_id, prompt, self._in_flight)
        self._in_flight[name] += 1
        self._sent_at[attempt_id] = self.seconds
        self.prompt_tokens += len(prompt)
        params = SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True)
        self._schedulers[name].add(EngineRequest(attempt_id, tuple(prompt), params), self.seconds)
        self._step(name)

    def _step(self, name: str) -> None:
        if name not in self._running and (output := self._schedulers[name].schedule(self.seconds)).rows:
            self._running[name] = output
            tokens = sum(row.num_tokens for row in output.rows)
            heapq.heappush(self._events, (self.seconds + SECONDS_PER_STEP + tokens * SECONDS_PER_TOKEN, name))

    def _note(self, name: str, delta: TokenDelta, send_next: Callable[[], None]) -> None:
        if delta.num_cached_tokens is not None:
            self.cached_tokens += delta.num_cached_tokens
            self.ttft_s[delta.request_id] = self.seconds - self._sent_at[delta.request_id]
            self.chooser.started(delta.request_id, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self._in_flight[name] -= 1
            self.chooser.ended(delta.request_id)
            send_next()
