"""The faults. Each is a coroutine that starts requests, injects a fault and returns while they run.

Known point: after a given event of one stream, with a few others around it. Random point: under 32
streams, at a moment drawn from the seed. `experiment` has the checks afterwards.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import psutil  # type: ignore[import-untyped]

from load_tests.chaos.client_faults import exhaust_kv, overfill_queue, read_slowly, vanish
from load_tests.chaos.experiment import Experiment, Fault
from load_tests.chaos.fleet import NotInTimeError, Shape
from load_tests.chaos.hang_ups import hang_up
from load_tests.chaos.server_faults import kill_controller_in_update, kill_gcs, kill_proxy
from load_tests.chaos.traffic import Outcome, ask, send, text
from load_tests.chaos.updates import refused_update, set_arg, set_damaged_model, set_knobs, set_other_model, update

_AT_TOKEN = 200
_RANDOM_WITHIN_S = 1.5
_NEWCOMERS = 8
_LONG_PROMPT, _ONLY_THE_LONG = 3900, 700
"""The longest prompt; no other sequence reaches this position."""
_SHORT_STEPS = Shape(step_tokens=8)
"""Steps so small that a prompt of `_LONG_PROMPT` tokens takes half a second."""
_SMALL_POOL = Shape(kv_cache_gib=0.004)
"""A KV pool of about 7,500 tokens in 8 bits and 4,200 in 16; eight sequences need 12,000."""
_NO_PATIENCE = Shape(failover_wait_s=2.0)
"""Failover that waits for less time than Ray takes to replace replicas."""
_REFUSED = "request_killed_replicas"
_MAY_FAIL = frozenset({Outcome.ERROR})
_MAY_BE_CUT = frozenset({Outcome.ERROR, Outcome.CUT})


def _strike_replica(number: signal.Signals) -> Callable[[Experiment], Awaitable[None]]:
    async def strike(experiment: Experiment) -> None:
        experiment.send_signal(await _replica_in_decode(experiment), number)

    return strike


async def _replica_in_decode(experiment: Experiment) -> int:
    """Known: the victim's replica, after its 200th event. Random: any replica, at any time."""
    if experiment.moment == "known":
        victim, pid = await experiment.victim()
        await victim.tokens(_AT_TOKEN)
        return pid
    await experiment.streams()
    await experiment.random_moment(_RANDOM_WITHIN_S)
    return int(experiment.rng.choice(experiment.fleet.replicas()).pid)


async def _stick_step(experiment: Experiment) -> None:
    """Stop a replica's engine thread while its other threads run.

    Requests arrive until Ray has replaced it.
    """
    asks = await experiment.mixed(Random(8), 16, 400)
    threads = {
        process.pid: await asyncio.to_thread(_engine_thread, process.pid) for process in experiment.fleet.replicas()
    }
    thread = threads[await _replica_in_decode(experiment)]
    command = (sys.executable, "-m", "load_tests.chaos.stuck_thread", str(thread))
    sticking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert sticking.stdout is not None
    if not await sticking.stdout.readline():
        raise RuntimeError("the engine's thread could not be stopped")
    experiment.struck()
    while sticking.returncode is None:
        await experiment.trickle(asks)


def _engine_thread(pid: int) -> int:
    """Return the kernel's id of the thread that runs the engine's steps."""
    py_spy = Path(sys.executable).with_name("py-spy")
    dump = subprocess.run((py_spy, "dump", "--json", "--pid", str(pid)), capture_output=True, check=True).stdout
    return next(int(thread["os_thread_id"]) for thread in json.loads(dump) if thread["thread_name"] == "engine")


async def _kill_in_prefill(experiment: Experiment) -> None:
    """Kill the replica while it computes the victim's prompt of 3,900 tokens.

    At the random point, while it computes 32 prompts of 1,500 tokens.
    """
    if experiment.moment == "known":
        victim, pid = await experiment.victim(tokens=100, prompt=_LONG_PROMPT)
        experiment.send_signal(pid, signal.SIGKILL)
        if victim.answer.events:
            experiment.row.problems.append("the prefill was over before the strike")
    else:
        await experiment.streams(long_prompts=True)
        await asyncio.sleep(experiment.rng.uniform(0.1, 2.0))
        experiment.send_signal(experiment.rng.choice(experiment.fleet.replicas()).pid, signal.SIGKILL)


async def _kill_twice(experiment: Experiment) -> None:
    """Kill the victim's replica and, once the stream has continued, the next one.

    The stream must end on the third. At the random point: any replica, and another one a moment
    later.
    """
    if experiment.moment == "known":
        victim, pid = await experiment.victim(alone=True)
        await victim.tokens(_AT_TOKEN)
        os.kill(pid, signal.SIGKILL)
        await victim.tokens(victim.answer.num_tokens + 20)
        experiment.send_signal(await experiment.locate(but=pid), signal.SIGKILL)
    else:
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)
        first, second = experiment.rng.sample([process.pid for process in experiment.fleet.replicas()], 2)
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(experiment.rng.uniform(0, 2))
        experiment.send_signal(second, signal.SIGKILL)


async def _kill_until_refused(experiment: Experiment) -> None:
    """Kill every replica that computes one long prompt, until its request is refused.

    Other streams continue.
    """
    if experiment.moment == "known":
        for a in await experiment.mixed(Random(9), _NEWCOMERS, 400):
            experiment.start(a)
    else:
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)
    deadly = ask("deadly", text(experiment.rng, _LONG_PROMPT), 190)
    sending = asyncio.create_task(send(experiment.session, experiment.fleet.url, deadly))
    killed: set[int] = set()
    while not sending.done():
        pid = await asyncio.to_thread(experiment.fleet.computes_beyond, _ONLY_THE_LONG)
        if pid is not None and pid not in killed:
            killed.add(pid)
            experiment.send_signal(pid, signal.SIGKILL)
    answer = await sending
    experiment.row.notes["killed"] = len(killed)
    if answer.outcome is not Outcome.ERROR or _REFUSED not in answer.detail:
        experiment.row.problems.append(f"not refused as {_REFUSED}: {answer.outcome.value} {answer.detail}")
    if len(killed) < 3:
        experiment.row.problems.append(f"refused after {len(killed)} replicas")


async def _leave_none(experiment: Experiment) -> None:
    """Kill all replicas at once, with a short `failover_wait_s`.

    Streams end with one error event, new requests get a 503.
    """
    await _under_way(experiment)
    under_way = [answer for answer in experiment.answers if answer.outcome is Outcome.HUNG]
    _kill_replicas(experiment)
    await experiment.finish()
    newcomers = [experiment.start(ask(f"newcomer {i}", "Is anybody left?", 8)) for i in range(_NEWCOMERS)]
    await experiment.finish()
    problems = experiment.row.problems
    # Those that completed had been computed before the strike.
    failed = [answer for answer in under_way if answer.outcome is Outcome.ERROR]
    refused = [*newcomers, *(answer for answer in failed if answer.status != 200)]
    experiment.row.notes["ended_in_their_streams"] = in_stream = sum(answer.status == 200 for answer in failed)
    if not in_stream:
        problems.append("no stream was ended by an error")
    for answer in refused:
        if answer.status != 503 or not answer.retry_after_s:
            problems.append(f"{answer.ask.name}: no 503 with Retry-After but {answer.status} {answer.detail}")


async def _kill_all(experiment: Experiment) -> None:
    """Kill all replicas at once. Streams may end with a typed error, and the fleet must recover."""
    await _under_way(experiment)
    _kill_replicas(experiment)


def _kill_replicas(experiment: Experiment) -> None:
    pids = [process.pid for process in experiment.fleet.replicas()]
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    experiment.send_signal(pids[0], signal.SIGKILL)


async def _under_way(experiment: Experiment) -> None:
    """Known: nine streams, at the victim's 200th event. Random: 32 streams, at any time."""
    if experiment.moment == "known":
        victim, _ = await experiment.victim()
        await victim.tokens(_AT_TOKEN)
    else:
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)


def _kill_one(which: str) -> Callable[[Experiment], Awaitable[None]]:
    async def strike(experiment: Experiment) -> None:
        """Kill a process that has neither replicas nor streams."""
        await _under_way(experiment)
        process = getattr(experiment.fleet, which)()[0]
        experiment.send_signal(process.pid, signal.SIGKILL)

    return strike


async def _terminate(experiment: Experiment) -> None:
    """Send SIGTERM to the launcher.

    Streams complete, new requests are refused, every process ends.
    """
    await _under_way(experiment)
    fleet = experiment.fleet
    family = fleet.family()
    os.kill(fleet.pid, signal.SIGTERM)
    experiment.struck()
    under_way = [answer for answer in experiment.answers if answer.events]
    await asyncio.sleep(1)
    newcomers = [experiment.start(ask(f"newcomer {i}", "Is it too late?", 8)) for i in range(_NEWCOMERS)]
    await experiment.finish()
    served = [a.ask.name for a in newcomers if a.outcome is Outcome.COMPLETE]
    experiment.row.problems.extend(f"{name} was served" for name in served)
    unfinished = [answer for answer in under_way if answer.outcome is not Outcome.COMPLETE]
    experiment.row.problems.extend(f"{a.ask.name} was running: {a.outcome.value} {a.detail}" for a in unfinished)
    status, left = await asyncio.to_thread(fleet.wait_gone, family)
    if status != 0 or left:
        experiment.row.problems.append(f"the launcher ended with status {status}; {len(left)} processes outlive it")


async def _lose_node(experiment: Experiment) -> None:
    """Kill all processes of a node at the known point; freeze them, which Ray does not report, at
    the random one."""
    if experiment.moment == "known":
        victim, replica = await experiment.victim()
        await victim.tokens(_AT_TOKEN)
        number = signal.SIGKILL
    else:
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)
        replica = experiment.rng.choice(experiment.fleet.replicas()).pid
        number = signal.SIGSTOP
    family = await asyncio.to_thread(_node_of, experiment, replica)
    for pid in family[1:]:
        os.kill(pid, number)
    experiment.send_signal(family[0], number)
    await experiment.finish()
    # Frozen processes do not end by themselves.
    for pid in family:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _node_of(experiment: Experiment, replica: int) -> list[int]:
    """Return the pids of the raylet of `replica` and of all its descendants."""
    for raylet in experiment.fleet.nodes():
        below = [process.pid for process in raylet.children(recursive=True)]
        if replica in below:
            return [raylet.pid, *below]
    raise NotInTimeError(f"no node has the replica {replica}")


UPDATES = tuple(
    Fault(f"update: {what}", strike, moments=("known",), recovery_limit_s=60, stall_limit_s=60)
    for what, strike in (
        ("knobs", update(set_knobs, restarts=False)),
        ("knobs, and a kill", update(set_knobs, restarts=False, kill=True)),
        ("scheduler", update(set_arg("engine.max_wait_s", 1.5))),
        ("max_model_len", update(set_arg("engine.max_model_len", 4000))),
        ("quantization", update(set_arg("quantization", "none"))),
        ("model", update(set_other_model)),
        ("num_replicas", update(set_arg("num_replicas", 2), replicas=2)),
        ("ingress", update(set_arg("ingress.max_queued_requests", 80))),
        ("what cannot be loaded", refused_update(set_damaged_model)),
    )
)
"""Changes of one key of each kind. Each is changed and changed back."""

FAULTS = (
    Fault("replica SIGKILL in decode", _strike_replica(signal.SIGKILL), stall_limit_s=10),
    Fault("replica SIGKILL in prefill", _kill_in_prefill, stall_limit_s=10),
    Fault("replica SIGSTOP", _strike_replica(signal.SIGSTOP), stall_limit_s=10),
    Fault("engine stuck in a step", _stick_step, stall_limit_s=15),
    Fault("replica SIGKILL, then the next", _kill_twice),
    Fault("all replicas SIGKILL", _kill_all, allowed=_MAY_FAIL, recovery_limit_s=60, stall_limit_s=60),
    Fault("replicas SIGKILL until refused", _kill_until_refused, shape=_SHORT_STEPS, recovery_limit_s=60),
    Fault("ingress SIGKILL", _kill_one("ingress"), allowed=_MAY_BE_CUT, recovery_limit_s=60),
    Fault("controller SIGKILL", _kill_one("controller")),
    Fault("controller SIGKILL in an update", kill_controller_in_update, _MAY_FAIL, ("known",), recovery_limit_s=60),
    Fault("proxy SIGKILL", kill_proxy, allowed=_MAY_BE_CUT, moments=("known",), recovery_limit_s=60),
    Fault("10,000 clients hang up", hang_up, moments=("known",)),
    Fault("KV pool exhausted", exhaust_kv, shape=_SMALL_POOL, stall_limit_s=120),
    Fault("queue overfilled 10x", overfill_queue, allowed=_MAY_FAIL, recovery_limit_s=60),
    Fault("500 clients vanish", vanish),
    Fault("readers of a byte a second", read_slowly, stall_limit_s=10),
    *UPDATES,
    Fault("no replica left", _leave_none, allowed=_MAY_FAIL, shape=_NO_PATIENCE, recovery_limit_s=60),
    Fault("node lost", _lose_node, on_nodes=True, stall_limit_s=30),
    Fault("GCS SIGKILL", kill_gcs, moments=("known",), last=True),
    Fault("SIGTERM", _terminate, allowed=_MAY_BE_CUT, last=True),
)
