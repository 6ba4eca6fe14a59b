"""Runs a workload on an engine without a server: closed loop, with the time of each token.

A token's time is the end of its step.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.workloads.client import RequestResult, Run
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.prompts import PromptWriter
from serve_app.workloads.runs import OnDone, Runner


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One request's part of a step: its number, its tokens, whether it ended, and its error."""

    number: int
    tokens: int
    ended: bool
    error: str | None = None


class Engine(Protocol):
    """An engine that computes several requests per step."""

    def add(self, number: int, prompt: Sequence[int], item: WorkItem) -> None:
        """Add the request `item` with the tokens of its text.

        It is sampled to exactly its number of tokens.
        """

    def step(self) -> Iterable[StepOutput]:
        """Compute one step."""


class _Lanes:
    """The requests of a workload that may be in flight, by `Workload.lanes`."""

    def __init__(self, workload: Workload) -> None:
        self._free = list(workload.lanes)
        lanes = len(self._free)
        self._waiting = [deque(range(lane, len(workload.items), lanes)) for lane in range(lanes)]

    def take(self) -> Iterator[int]:
        """Yield the requests that may start now."""
        for lane, numbers in enumerate(self._waiting):
            while numbers and self._free[lane]:
                self._free[lane] -= 1
                yield numbers.popleft()

    def release(self, number: int) -> None:
        """Record that this request has been answered."""
        self._free[number % len(self._free)] += 1


def step_runner(engine: Engine, writer: PromptWriter) -> Runner:
    """Return a runner that feeds an engine in a closed loop.

    A request's clock starts when the engine gets it.
    """

    def run(workload: Workload, on_done: OnDone) -> Run:
        prompts = [writer.tokenizer.encode(item.prompt) for item in workload.items]
        results = [RequestResult(item) for item in workload.items]
        lanes = _Lanes(workload)
        last: dict[int, float] = {}
        """The time of the latest token of each request in flight, or of its start."""
        cpu, start = time.process_time(), time.perf_counter()
        while True:
            for number in lanes.take():
                last[number] = time.perf_counter()
                results[number].due_s = last[number] - start
                engine.add(number, prompts[number], results[number].item)
            if not last:
                break
            for output in engine.step():
                now, result = time.perf_counter(), results[output.number]
                if output.tokens:
                    _note_tokens(result, now - last[output.number], output.tokens)
                    last[output.number] = now
                if output.ended:
                    result.e2e_s = now - start - result.due_s
                    result.error = output.error
                    del last[output.number]
                    lanes.release(output.number)
                    on_done(result)
        return Run(workload, tuple(results), time.perf_counter() - start, time.process_time() - cpu)

    return run


def _note_tokens(result: RequestResult, gap_s: float, count: int) -> None:
    if result.ttft_s is None:
        result.ttft_s = gap_s
    else:
        result.gaps_s.append(gap_s)
    result.output_tokens += count
