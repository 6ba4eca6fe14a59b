"""Updates of any config key, there and back, while long streams run and requests queue.

Every request must be answered, each answer by one revision. A config that cannot be loaded leaves
the old revision serving. The way back replaces the new fleet by the old one, so both directions are
tested.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml

from load_tests.chaos.experiment import STREAMS, Experiment
from load_tests.chaos.fleet import NotInTimeError, wait_for
from load_tests.chaos.small_model import write_small_model
from load_tests.chaos.traffic import Ask

_LIMIT_S = 240.0
_ANSWER_TOKENS = 200
_ENDS = ("deployed", "nothing has changed", "deployment failed")

Application = dict[str, Any]
Change = Callable[[Application], object]
Strike = Callable[[Experiment], Awaitable[None]]


def update(change: Change, *, restarts: bool = True, replicas: int | None = None, kill: bool = False) -> Strike:
    """Return a fault that changes the application and changes it back.

    restarts: every process is replaced. replicas: their number after that. kill: kill a replica
    during the update.
    """

    async def strike(experiment: Experiment) -> None:
        fleet = experiment.fleet
        before = fleet.config.read_text()
        asks = await _load(experiment)
        for config, count in ((_changed(before, change), replicas), (before, None)):
            old = {process.pid for process in fleet.replicas()}
            said = await _deploy(experiment, config, asks, kill=kill)
            if said != "deployed":
                raise NotInTimeError(f"the update was not deployed: {said}")
            await _replaced(experiment, asks, old if restarts else set(), count or fleet.shape.replicas)
            if config != before:
                await experiment.learn_again(asks)

    return strike


def refused_update(change: Change) -> Strike:
    """Return a fault with a change that fails only when a replica loads, and its reversal."""

    async def strike(experiment: Experiment) -> None:
        before = experiment.fleet.config.read_text()
        asks = await _load(experiment)
        said = await _deploy(experiment, _changed(before, change), asks)
        if "deployment failed" not in said:
            raise NotInTimeError(f"the update was not refused: {said}")
        for _ in range(50):
            await experiment.trickle(asks)
        if (said := await _deploy(experiment, before, asks)) != "deployed":
            raise NotInTimeError(f"the old settings were not deployed again: {said}")

    return strike


def set_arg(key: str, value: Any) -> Change:
    """Return a change of the `key` of `args`, with dots."""

    def change(application: Application) -> None:
        *path, name = key.split(".")
        section = application["args"]
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value

    return change


def set_knobs(application: Application) -> None:
    """Change settings that running engines apply."""
    knobs = {"max_num_seqs": 4, "waiting_served_ratio": 1.0}
    application["deployments"] = [{"name": "EngineReplica", "user_config": knobs}]


def set_other_model(application: Application) -> None:
    """Change the model: other weights, and other token ids for the same text."""
    folder = Path(application["args"]["model"]).with_name("other-model")
    if not folder.exists():
        write_small_model(folder, seed=1, reverse=True)
    application["args"]["model"] = str(folder)


def set_damaged_model(application: Application) -> None:
    """Change to a model with truncated weights."""
    model = Path(application["args"]["model"])
    folder = Path(shutil.copytree(model, model.with_name("damaged-model"), dirs_exist_ok=True))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    application["args"]["model"] = str(folder)


def end_of_update(log: Path, num_lines: int) -> str | None:
    """Return the launcher's line about the end of an update; None if there is none after the first
    `num_lines` lines of its log."""
    for line in log.read_text().splitlines()[num_lines:]:
        text = line.partition("] ")[2]
        if text.startswith(_ENDS) or text.endswith(_ENDS):
            return text
    return None


def _has_begun(log: Path, num_lines: int) -> bool:
    return any("] deploying " in line for line in log.read_text().splitlines()[num_lines:])


async def _load(experiment: Experiment) -> list[Ask]:
    """Start more requests than the engines hold, one of them long.

    Return requests to continue with.
    """
    asks = await experiment.mixed(Random(8), STREAMS, _ANSWER_TOKENS)
    victim, _ = await experiment.victim()
    for number in range(2):
        for a in asks:
            experiment.start(replace(a, body=a.body | {"user": f"user {number}"}))
    await victim.tokens(1)
    return asks


def _changed(config: str, change: Change) -> str:
    data = yaml.safe_load(config)
    change(data["applications"][0])
    return yaml.safe_dump(data)


async def _deploy(experiment: Experiment, config: str, asks: list[Ask], *, kill: bool = False) -> str:
    """Deploy the config through the launcher while requests arrive.

    Return the last line of the update.
    """
    fleet = experiment.fleet
    log = fleet.config.with_suffix(".log")
    fleet.config.write_text(config)
    num_lines = len(log.read_text().splitlines())
    os.kill(fleet.pid, signal.SIGUSR1)
    experiment.struck()
    if kill:
        # Requests have lines in this log too.
        await wait_for(lambda: _has_begun(log, num_lines), "start of the update", 30)
        ready = await asyncio.to_thread(fleet.ready_replicas)
        os.kill(ready[0], signal.SIGKILL)
    async for _ in _trickling(experiment, asks, "end of the update"):
        if (said := end_of_update(log, num_lines)) is not None:
            return said
    raise AssertionError


async def _replaced(experiment: Experiment, asks: list[Ask], old: set[int], count: int) -> None:
    async for _ in _trickling(experiment, asks, f"{count} new replicas and no old one"):
        now = {process.pid for process in experiment.fleet.replicas()}
        if not now & old and len(now) == count:
            return


async def _trickling(experiment: Experiment, asks: list[Ask], what: str) -> Any:
    """Keep requests coming until the caller has seen enough. Raises `NotInTimeError`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _LIMIT_S
    while loop.time() < deadline:
        await experiment.trickle(asks)
        yield
    raise NotInTimeError(f"not in time: {what}")
