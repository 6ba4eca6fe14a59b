"""Faults and autoscaling with real weights on one device: what clients of two replicas notice."""

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
from load_tests.gpu.server import Started, server

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
_WHOLE_LIMIT_S = 100.0
_SCALE = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 3.0, "downscale_delay_s": 5.0}


def check_faults(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """Streams on two replicas, greedy and sampled; one replica is killed, then one is frozen."""
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
        **_small_steps(device),
    }
    args: dict[str, Any] = {"dtype": "bfloat16" if gpu else "float32", "engine": engine}
    for replicas, signals in ((2, (signal.SIGKILL, signal.SIGSTOP)), (1, (signal.SIGKILL,))):
        with server(folder(), device, replicas=replicas, **args) as started:

            async def experiment(struck: signal.Signals, started: Started = started) -> Result:
                await started.fleet.wait_whole(_WHOLE_LIMIT_S)
                return await _strike(started, asks, struck)

            for struck in signals:
                checks.check(
                    f"{count} streams, one of {replicas} replicas gets {struck.name}",
                    "all equal to the undisturbed ones",
                    lambda struck=struck, experiment=experiment: asyncio.run(experiment(struck)),  # type: ignore[misc]
                )


async def _strike(started: Started, asks: Sequence[Ask], struck: signal.Signals) -> Result:
    """Strikes the busier replica once every stream has begun."""
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
        victim = max(in_flight, key=lambda pid: in_flight[pid])
        struck_at = time.monotonic()
        os.kill(victim, struck)
        answers = await asyncio.gather(*running)
    equal = sum(
        answer.outcome is Outcome.COMPLETE and compare(answer, calm).equal
        for answer, calm in zip(answers, undisturbed, strict=True)
    )
    whole_s = await wait_for(lambda: _is_whole(started, victim), "all replicas ready again", _WHOLE_LIMIT_S)
    return {
        "passed": equal == len(asks),
        "equal": equal,
        "of": len(asks),
        "struck": in_flight[victim],
        "longest_silence_s": max(answer.silence_s(struck_at) for answer in answers),
        "whole_after_s": whole_s,
        "first_error": next((answer.detail for answer in answers if answer.detail), ""),
    }


def _is_whole(started: Started, victim: int) -> bool:
    ready = started.fleet.ready_replicas()
    return len(ready) == started.fleet.shape.replicas and victim not in ready


def _small_steps(device: str) -> dict[str, Any]:
    """Settings that let several replicas share two cores."""
    return {} if device == "cuda" else {"num_threads": 1, "max_num_batched_tokens": 128}


def check_autoscaling(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """Load until there are two replicas, then none until there is one."""
    gpu = device == "cuda"
    engine: dict[str, Any] = {"kv_cache_gib": 0.5, "max_num_seqs": 16, "max_num_waiting": 0, **_small_steps(device)}
    args: dict[str, Any] = {
        "dtype": "bfloat16" if gpu else "float32",
        "engine": engine,
        "autoscaling": _SCALE,
        "ingress": {"max_queued_requests": 1024},
    }

    async def experiment(started: Started) -> Result:
        async with open_session() as session:

            async def user(number: int) -> None:
                while True:
                    await send(session, started.url, ask(str(number), PROMPTS[number % len(PROMPTS)], 200))

            users = [asyncio.create_task(user(number)) for number in range(64)]
            try:
                up_s = await wait_for(lambda: len(started.fleet.ready_replicas()) == 2, "two replicas", 100)
            finally:
                for task in users:
                    task.cancel()
                await asyncio.gather(*users, return_exceptions=True)
            down_s = await wait_for(lambda: len(started.fleet.ready_replicas()) == 1, "one replica again", 90)
        return {"passed": True, "two_after_s": up_s, "one_again_after_s": down_s}

    with server(folder(), device, **args) as started:
        checks.check("replicas follow the load", "1, 2, 1", lambda: asyncio.run(experiment(started)))
