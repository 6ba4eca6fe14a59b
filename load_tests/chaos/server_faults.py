"""Faults of the processes around the replicas: Ray's GCS, the proxy, the controller during an
update."""

import asyncio
import os
import signal
import time
from random import Random

import yaml

from load_tests.chaos.experiment import Experiment
from load_tests.chaos.fleet import wait_for
from load_tests.chaos.traffic import Outcome
from load_tests.chaos.updates import set_arg
from serve_app.system.http_client import HttpStatusError, fetch

_STREAM_TOKENS = 400
_INTO_THE_UPDATE_S = 1.5
_AWAY_LIMIT_S = 3.0
"""Limit of HAProxy's absence in seconds."""
_NOT_READY_LIMIT_S = 5.0
_SERVED, _COME_BACK = 200, 503


async def kill_proxy(experiment: Experiment) -> None:
    """Kill the proxy: its connections end. HAProxy is back within 3 s; Ray's proxy takes longer."""
    await _under_way(experiment)
    killed = time.monotonic()
    experiment.send_signal(experiment.fleet.proxy()[0].pid, signal.SIGKILL)
    await asyncio.sleep(0.05)  # until the kernel has closed its port
    await wait_for(lambda: _health(experiment) == _SERVED, "the proxy answers again", experiment.fault.recovery_limit_s)
    away_s = time.monotonic() - killed
    experiment.row.notes["away_s"] = round(away_s, 2)
    if experiment.fleet.path == "fast" and away_s > _AWAY_LIMIT_S:
        experiment.row.problems.append(f"HAProxy was away for {away_s:.1f} s")


async def kill_gcs(experiment: Experiment) -> None:
    """Kill Ray's GCS.

    The server is not ready at once, streams complete, one line is logged, and the exit status is 1.
    """
    fleet = experiment.fleet
    await _under_way(experiment)
    family = fleet.family()
    fleet_log = fleet.config.with_suffix(".log")
    experiment.send_signal(fleet.processes(r"/gcs_server ")[0].pid, signal.SIGKILL)
    not_ready = lambda: _health(experiment) != _SERVED  # noqa: E731
    experiment.row.notes["not_ready_s"] = round(await wait_for(not_ready, "not ready", _NOT_READY_LIMIT_S), 2)
    await experiment.finish()
    status, left = await asyncio.to_thread(fleet.wait_gone, family)
    if status != 1 or left:
        experiment.row.problems.append(f"the launcher ended with status {status}; {len(left)} processes outlive it")
    if (lines := fleet_log.read_text().count("Ray's GCS")) != 1:
        experiment.row.problems.append(f"{lines} lines in the log about the GCS")


async def kill_controller_in_update(experiment: Experiment) -> None:
    """Kill the controller during an update. New requests are served or get a 503 with Retry-After.

    Never a 404, which clients do not retry.
    """
    fleet = experiment.fleet
    asks = await experiment.mixed(Random(6), 8, _STREAM_TOKENS)
    before = fleet.config.read_text()
    config = yaml.safe_load(before)
    set_arg("engine.max_wait_s", 1.5)(config["applications"][0])
    for text in (yaml.safe_dump(config), before):
        old = {process.pid for process in fleet.replicas()}
        fleet.config.write_text(text)
        os.kill(fleet.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _INTO_THE_UPDATE_S
        while time.monotonic() < deadline:
            await experiment.trickle(asks)
        experiment.send_signal(fleet.controller()[0].pid, signal.SIGKILL)
        limit = time.monotonic() + experiment.fault.recovery_limit_s
        while old & set(await asyncio.to_thread(fleet.ready_replicas)) and time.monotonic() < limit:
            await experiment.trickle(asks)
        await fleet.wait_whole()
    await experiment.finish()
    refused = [answer for answer in experiment.answers if answer.outcome is Outcome.ERROR]
    experiment.row.notes["with_retry_after"] = len(refused)
    experiment.row.problems.extend(
        f"{answer.ask.name}: {answer.status} {answer.detail}"
        for answer in refused
        if answer.status != _COME_BACK or not answer.retry_after_s
    )


async def _under_way(experiment: Experiment) -> None:
    """Start eight streams and wait for their first tokens."""
    asks = await experiment.mixed(Random(6), 8, _STREAM_TOKENS)
    answers = [experiment.start(a) for a in asks]
    await wait_for(lambda: all(answer.events or answer.ended_at for answer in answers), "first tokens", 60)


def _health(experiment: Experiment) -> int:
    """Return the status of /health/ready; 0 without an answer."""
    try:
        fetch(f"{experiment.fleet.url}/health/ready", timeout_s=1)
    except HttpStatusError as error:
        return error.status
    except (OSError, ValueError):
        return 0
    return _SERVED
