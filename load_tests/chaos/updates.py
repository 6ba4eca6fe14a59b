"""Updates while long streams run and requests queue: any key of the config file, changed and
changed back.

What must hold: every request is answered, each answer is whole from one revision, and what cannot
be loaded leaves the old revision serving. On the way back the new fleet is the old one, so both
directions are seen.
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
    """Change the application and change it back. restarts: every process is replaced; replicas:
    then so many; kill:
    a replica dies while the update is on its way."""

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
    """Change the application to what only a replica that loads can find out, and change it back."""

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
    """`key` of `args`, with dots."""

    def change(application: Application) -> None:
        *path, name = key.split(".")
        section = application["args"]
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value

    return change


def set_knobs(application: Application) -> None:
    """Settings that running engines take over."""
    knobs = {"max_num_seqs": 4, "waiting_served_ratio": 1.0}
    application["deployments"] = [{"name": "EngineReplica", "user_config": knobs}]


def set_other_model(application: Application) -> None:
    """Other weights, and a tokenizer to which the same text is other tokens."""
    folder = Path(application["args"]["model"]).with_name("other-model")
    if not folder.exists():
        write_small_model(folder, seed=1, reverse=True)
    application["args"]["model"] = str(folder)


def set_damaged_model(application: Application) -> None:
    """A model whose weights end in the middle."""
    model = Path(application["args"]["model"])
    folder = Path(shutil.copytree(model, model.with_name("damaged-model"), dirs_exist_ok=True))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    application["args"]["model"] = str(folder)


def end_of_update(log: Path, told: int) -> str | None:
    """What the launcher has said of the end of an update, beyond the first `told` lines of its log,
    if it has."""
    for line in log.read_text().splitlines()[told:]:
        text = line.partition("] ")[2]
        if text.startswith(_ENDS) or text.endswith(_ENDS):
            return text
    return None


def _has_begun(log: Path, told: int) -> bool:
    return any("] deploying " in line for line in log.read_text().splitlines()[told:])


async def _load(experiment: Experiment) -> list[Ask]:
    """More requests than the engines hold, one of them long; returns what to go on with."""
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
    """Have the launcher deploy it while requests come; what it says in the end."""
    fleet = experiment.fleet
    log = fleet.config.with_suffix(".log")
    fleet.config.write_text(config)
    told = len(log.read_text().splitlines())
    os.kill(fleet.pid, signal.SIGUSR1)
    experiment.struck()
    if kill:
        # Requests have lines in this log too.
        await wait_for(lambda: _has_begun(log, told), "the launcher has read the config", 30)
        ready = await asyncio.to_thread(fleet.ready_replicas)
        os.kill(ready[0], signal.SIGKILL)
    async for _ in _trickling(experiment, asks, "the launcher says what became of the update"):
        if (said := end_of_update(log, told)) is not None:
            return said
    raise AssertionError


async def _replaced(experiment: Experiment, asks: list[Ask], old: set[int], count: int) -> None:
    async for _ in _trickling(experiment, asks, f"{count} replicas, no old one among them"):
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
