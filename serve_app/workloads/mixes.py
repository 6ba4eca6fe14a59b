"""The named workloads: requests, their lengths and their times, all derived from a seed.

Sends nothing. Lengths depend on the seed alone. Text depends on (seed, repeat, salt), so that a
server's prefix cache never contains the prompt of an earlier repeat.

    mixed          64 requests, 16 at once; prompts log-uniform 16..512, outputs exponential (mean
    64) in 4..256
    decode         16 requests at once; 32 in, 128 out
    prefill        32 requests, 8 at once; 1024 in, 1 out
    single         4 requests, sequential; 32 in, 128 out
    first_token    24 requests, sequential; 32 in, 1 out: like the first tokens of `single`
    shared_prefix  32 requests, 8 at once; 768 tokens shared by all, 32 of their own, 16 out
    repetitive     as single, but the prompt repeats 32 tokens four times, and the answer continues
    this
    long           8 requests, 4 at once; 3000 in, 64 out
    crowd          128 requests, 64 at once; 20..120 in, 16..96 out, both uniform
    lognormal      48 requests, 12 at once; in: median 128, sigma 1.0, 16..1536; out: median 64,
    sigma 0.7, 4..256 agents         8 agents at once, 6 turns each, a turn after the previous
    answer; prompts have 384 shared
                   tokens and 64 of the agent; each further turn repeats the history and adds 128;
                   48 out.
                   All text is fixed in advance, including answers in the history, so that all
                   servers get
                   the same prompts
    sampled        as mixed, with other texts, temperature 0.9 and top_p 0.95; all others are greedy
    poisson        open loop: arrivals at `rate` per second for `duration` seconds, lengths as in
    mixed
    bursty         as poisson, in bursts: the coefficient of variation of the gaps is 4
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from serve_app.workloads.arrivals import Arrival, crowd_lengths, lognormal_lengths, mixed_lengths, random_arrivals
from serve_app.workloads.prompts import PromptWriter

WORKLOADS = (
    *("mixed", "decode", "prefill", "single", "first_token", "shared_prefix", "repetitive"),
    *("long", "crowd", "lognormal", "agents", "sampled", "poisson", "bursty"),
)
BURSTY_VARIATION = 4.0
Lengths = Callable[[Random], tuple[int, int]]
"""Prompt tokens and output tokens of one request."""

_FIXED: dict[str, tuple[int, int, int, int]] = {
    # name: requests, concurrent requests, prompt tokens, output tokens
    "decode": (16, 16, 32, 128),
    "prefill": (32, 8, 1024, 1),
    "single": (4, 1, 32, 128),
    "first_token": (24, 1, 32, 1),
    "long": (8, 4, 3000, 64),
}
_DRAWN: dict[str, tuple[int, int, Lengths]] = {
    # name: requests, concurrent requests, function that draws lengths
    "mixed": (64, 16, mixed_lengths),
    "crowd": (128, 64, crowd_lengths),
    "lognormal": (48, 12, lognormal_lengths),
}
_REPETITIVE_REQUESTS, _PASSAGE_TOKENS, _PASSAGE_TIMES, _REPETITIVE_OUTPUT = 4, 32, 4, 128
_PREFIX_REQUESTS, _PREFIX_CONCURRENCY, _PREFIX_TOKENS, _OWN_TOKENS, _PREFIX_OUTPUT = 32, 8, 768, 32, 16
_AGENTS, _TURNS, _INSTRUCTION_TOKENS, _TASK_TOKENS, _TURN_TOKENS, _TURN_OUTPUT = 8, 6, 384, 64, 128, 48


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0: the most likely token, whatever top_p is."""

    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def for_transformers(self) -> dict[str, Any]:
        """Return it as in transformers' generation config, but without its default top_k of 50."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, top_p=0.95)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: prompt with its exact length in tokens, output tokens, due time.

    `at_s`: in seconds, for open loops.
    """

    prompt: str
    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in sending order. `concurrency` None means open loop: each at its own time.

    in_turns: request k belongs to user k modulo `concurrency`, who has at most one request in
    flight. Otherwise a request starts when any earlier one was answered.
    """

    name: str
    items: tuple[WorkItem, ...]
    concurrency: int | None
    in_turns: bool = False

    @property
    def lanes(self) -> tuple[int, ...]:
        """Concurrent requests of each lane of a closed loop. Request k uses lane k modulo lanes."""
        places = self.concurrency or len(self.items)
        return (1,) * places if self.in_turns else (places,)


def build_workload(
    name: str,
    writer: PromptWriter,
    *,
    seed: int = 0,
    repeat: int = 0,
    salt: str = "",
    rate: float = 1.0,
    duration_s: float = 60.0,
    num_requests: int | None = None,
) -> Workload:
    """Return the workload called `name` (see the module's docstring).

    `num_requests` overrides the number of requests (closed loop only); `rate` and `duration_s` are
    for open loops. Raises `ValueError` for an unknown name.
    """
    if name == "sampled":
        mixed = build_workload(
            "mixed", writer, seed=seed, repeat=repeat, salt=f"sampled {salt}", num_requests=num_requests
        )
        return replace(mixed, name=name, items=tuple(replace(item, sampling=SAMPLED) for item in mixed.items))
    lengths = Random(f"len-{name}-{seed}")
    texts = Random(f"text-{name}-{seed}-{repeat}-{salt}")

    def item(prompt_tokens: int, output_tokens: int) -> WorkItem:
        return WorkItem(writer.write(texts, prompt_tokens), prompt_tokens, output_tokens)

    if name in _DRAWN:
        count, concurrency, draw = _DRAWN[name]
        items = tuple(item(*draw(lengths)) for _ in range(num_requests or count))
        return Workload(name, items, concurrency)
    if name in _FIXED:
        count, concurrency, prompt_tokens, output_tokens = _FIXED[name]
        items = tuple(item(prompt_tokens, output_tokens) for _ in range(num_requests or count))
        return Workload(name, items, concurrency)
    if name == "shared_prefix":
        return _shared_prefix(writer, texts, num_requests or _PREFIX_REQUESTS)
    if name == "repetitive":
        return _repetitive(writer, texts, num_requests or _REPETITIVE_REQUESTS)
    if name == "agents":
        return _agents(writer, texts, num_requests or _AGENTS * _TURNS)
    if name in ("poisson", "bursty"):
        variation = BURSTY_VARIATION if name == "bursty" else 1.0
        return open_workload(name, writer, random_arrivals(lengths, rate, duration_s, variation), texts)
    raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")


def read_names(text: str) -> dict[str, int | None]:
    """Parse names separated by commas; `name:count` sets the number of requests.

    Raises `ValueError` for an unknown name or an invalid count.
    """
    wanted: dict[str, int | None] = {}
    for part in text.split(","):
        name, colon, count = part.partition(":")
        if name not in WORKLOADS:
            raise ValueError(f"{name!r} is not one of {', '.join(WORKLOADS)}")
        if colon and not (count.isdecimal() and int(count)):
            raise ValueError(f"{part!r}: {count!r} is not a number of requests")
        wanted[name] = int(count) if colon else None
    return wanted


def open_workload(name: str, writer: PromptWriter, arrivals: Iterable[Arrival], texts: Random) -> Workload:
    """Return an open-loop workload in which each arrival has its own text."""
    items = (WorkItem(writer.write(texts, a.prompt_tokens), a.prompt_tokens, a.output_tokens, a.at_s) for a in arrivals)
    return Workload(name, tuple(items), None)


def _shared_prefix(writer: PromptWriter, texts: Random, count: int) -> Workload:
    prefix = writer.write(texts, _PREFIX_TOKENS)
    items = tuple(
        WorkItem(writer.write(texts, _OWN_TOKENS, after=prefix), _PREFIX_TOKENS + _OWN_TOKENS, _PREFIX_OUTPUT)
        for _ in range(count)
    )
    return Workload("shared_prefix", items, _PREFIX_CONCURRENCY)


def _repetitive(writer: PromptWriter, texts: Random, count: int) -> Workload:
    items = []
    for _ in range(count):
        prompt = " ".join([writer.write(texts, _PASSAGE_TOKENS)] * _PASSAGE_TIMES)
        items.append(WorkItem(prompt, writer.count(prompt), _REPETITIVE_OUTPUT))
    return Workload("repetitive", tuple(items), 1)


def _agents(writer: PromptWriter, texts: Random, count: int) -> Workload:
    instruction = writer.write(texts, _INSTRUCTION_TOKENS)
    histories = [writer.write(texts, _TASK_TOKENS, after=instruction) for _ in range(_AGENTS)]
    items: list[WorkItem] = []
    for number in range(count):
        turn, agent = divmod(number, _AGENTS)
        if turn:
            histories[agent] = writer.write(texts, _TURN_TOKENS, after=histories[agent])
        prompt_tokens = _INSTRUCTION_TOKENS + _TASK_TOKENS + turn * _TURN_TOKENS
        items.append(WorkItem(histories[agent], prompt_tokens, _TURN_OUTPUT))
    return Workload("agents", tuple(items), _AGENTS, in_turns=True)
