"""A server through Ray for one stage, and closed-loop load on it."""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from load_tests.chaos.fleet import SERVE_APP, Fleet, Shape, path_environment, write_config
from load_tests.chaos.traffic import MODEL, Answer, Outcome, ask, open_session, send
from load_tests.gpu.checks import Result
from load_tests.servers import ServerCommand, running

_READY_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Started:
    """A ready server. ready_s: seconds from its start; log: its output."""

    fleet: Fleet
    ready_s: float
    log: Path

    @property
    def url(self) -> str:
        """The server's address."""
        return self.fleet.url


@contextmanager
def server(folder: Path, device: str, replicas: int = 1, **args: Any) -> Iterator[Started]:
    """Run `serve-app serve` with these `args` on the fast path, until the context ends.

    On a GPU each replica gets an equal share of the card. Raises `RuntimeError` if it does not
    become ready.
    """
    most = args.get("autoscaling", {}).get("max_replicas", replicas)
    number = {} if "autoscaling" in args else {"num_replicas": replicas}
    share = {"num_cpus": 0, "num_gpus": 1 / most if device == "cuda" else 0}
    config = write_config(
        folder / "config.yaml",
        {"served_model_name": MODEL, "device": device, **number, **args},
        [{"name": "EngineReplica", "ray_actor_options": share}],
    )
    port = yaml.safe_load(config.read_text())["http_options"]["port"]
    environment = path_environment("fast")
    command = ServerCommand(
        name="serve_app",
        command=(*SERVE_APP, "serve", str(config)),
        base_url=f"http://127.0.0.1:{port}",
        ready_path="/health/ready",
        environment=environment,
    )
    log = folder / "server.log"
    with running(command, log, _READY_LIMIT_S) as process:
        fleet = Fleet(command.base_url, process.pid, "fast", Shape(replicas=replicas), config, environment)
        yield Started(fleet, process.ready_s, log)


@contextmanager
def together(*servers: AbstractContextManager[Started]) -> Iterator[list[Started]]:
    """Start the servers at the same time and run them until the context ends."""
    # A server ends with the thread that started it.
    with ThreadPoolExecutor(len(servers)) as threads, ExitStack() as stack:
        starting = [threads.submit(stack.enter_context, each) for each in servers]
        wait(starting)
        yield [each.result() for each in starting]


def small_steps(device: str) -> dict[str, Any]:
    """Return engine settings with which several replicas share two cores."""
    return {} if device == "cuda" else {"num_threads": 1, "max_num_batched_tokens": 128}


async def closed_loop(
    url: str, prompts: Sequence[Sequence[int]], output: int, users: int, **fields: Any
) -> tuple[list[Answer], float]:
    """Return the answers to all prompts, at most `users` at a time, and the total seconds."""
    gate = asyncio.Semaphore(users)
    loop = asyncio.get_running_loop()

    async with open_session() as session:

        async def one(number: int, prompt: Sequence[int]) -> Answer:
            async with gate:
                return await send(session, url, ask(str(number), list(prompt), output, **fields))

        began = loop.time()
        answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        return answers, loop.time() - began


def load_figures(answers: Sequence[Answer], took_s: float) -> Result:
    """Return output tokens per second, and median TTFT and TPOT in milliseconds.

    Raises if an answer failed.
    """
    whole = [answer for answer in answers if answer.outcome is Outcome.COMPLETE]
    failed = [answer for answer in answers if answer.outcome is not Outcome.COMPLETE]
    if failed:
        return {"passed": False, "failed": len(failed), "of": len(answers), "first": failed[0].detail}
    tokens = [answer.num_tokens for answer in whole]
    ttft_s = [answer.wait_s() for answer in whole]
    tpot_s = [
        (answer.ended_at - answer.started_at - wait_s) / (count - 1)
        for answer, wait_s, count in zip(whole, ttft_s, tokens, strict=True)
        if count > 1
    ]
    return {
        "passed": True,
        "tokens_per_s": sum(tokens) / took_s,
        "ttft_p50_ms": 1e3 * statistics.median(ttft_s),
        "ttft_p99_ms": 1e3 * sorted(ttft_s)[int(0.99 * (len(ttft_s) - 1))],
        "tpot_p50_ms": 1e3 * statistics.median(tpot_s) if tpot_s else 0.0,
    }
