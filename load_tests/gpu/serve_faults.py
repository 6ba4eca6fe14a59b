"""Faults of two replicas with real weights on one device, and their effects on clients."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from load_tests.chaos.fleet import wait_for
from load_tests.chaos.traffic import Answer, Ask, Outcome, ask, compare, open_session, send
from load_tests.gpu.checks import Checks, Result
from load_tests.gpu.server import Started, server, small_steps

PROMPTS = (
    "The capital of France is",
    "2 + 2 =",
    "def fibonacci(n):\n",
    "Water boils at",
    "Once upon a time",
    "The three laws of",
    "In 1969,",
    "Dear Sir or Madam,",
)
_REPLICAS = 2
_WHOLE_LIMIT_S = 100.0
_FAILOVER_WAIT_S = 60.0
"""Time in seconds that streams wait without a replica. On two cores both restart in 20 to 40 s."""


def check_faults(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """Run greedy and sampled streams on two replicas. Kill one, then freeze one, then kill both."""
    gpu = device == "cuda"
    count, length = (24, 400) if gpu else (8, 160)
    asks = [
        ask(
            str(number),
            PROMPTS[number % len(PROMPTS)] + " " * (number // len(PROMPTS)),
            length,
            **({"temperature": 0.9, "seed": number} if number % 2 else {}),
        )
        for number in range(count)
    ]
    # Without drafts, which would end some streams before the strike.
    engine: dict[str, Any] = {
        "kv_cache_gib": 0.5,
        "deterministic": gpu,
        "max_num_seqs": count,
        "speculation": "off",
        **small_steps(device),
    }
    dtype = "bfloat16" if gpu else "float32"
    ingress = {"failover_wait_s": _FAILOVER_WAIT_S}
    with server(folder(), device, replicas=_REPLICAS, dtype=dtype, engine=engine, ingress=ingress) as started:

        async def experiment(victims: int, struck: signal.Signals) -> Result:
            await started.fleet.wait_whole(_WHOLE_LIMIT_S)
            return await _strike(started, asks, victims, struck)

        for victims, struck in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (_REPLICAS, signal.SIGKILL)):
            checks.check(
                f"{count} streams, {struck.name} to {victims} of {_REPLICAS} replicas",
                "all equal to the undisturbed ones",
                lambda victims=victims, struck=struck: asyncio.run(experiment(victims, struck)),  # type: ignore[misc]
            )


async def _strike(started: Started, asks: Sequence[Ask], count: int, struck: signal.Signals) -> Result:
    """Signal the `count` busiest replicas once every stream has tokens."""
    fleet = started.fleet
    async with open_session() as session:
        undisturbed = await asyncio.gather(*(send(session, fleet.url, each) for each in asks))
        begun = asyncio.Event()
        open_streams = {each.name for each in asks}

        def on_event(answer: Answer) -> None:
            open_streams.discard(answer.ask.name)
            if not open_streams:
                begun.set()

        running = [asyncio.create_task(send(session, fleet.url, each, on_event)) for each in asks]
        await asyncio.wait_for(begun.wait(), 60)
        in_flight = await asyncio.to_thread(fleet.in_flight)
        victims = sorted(in_flight, key=lambda pid: in_flight[pid])[-count:]
        struck_at = time.monotonic()
        for victim in victims:
            os.kill(victim, struck)
        answers = await asyncio.gather(*running)
    equal = sum(
        answer.outcome is Outcome.COMPLETE and compare(answer, calm).equal
        for answer, calm in zip(answers, undisturbed, strict=True)
    )
    whole_s = await wait_for(lambda: _is_whole(started, victims), "all replicas ready again", _WHOLE_LIMIT_S)
    return {
        "passed": equal == len(asks),
        "equal": equal,
        "of": len(asks),
        "struck": sum(in_flight[victim] for victim in victims),
        "longest_silence_s": max(answer.silence_s(struck_at) for answer in answers),
        "whole_after_s": whole_s,
        "first_error": next((answer.detail for answer in answers if answer.detail), ""),
    }


def _is_whole(started: Started, victims: Sequence[int]) -> bool:
    ready = started.fleet.ready_replicas()
    return len(ready) == started.fleet.shape.replicas and not set(ready) & set(victims)
