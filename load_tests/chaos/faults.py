"""The faults: what strikes when. Each is a coroutine that starts requests, strikes, and returns while they run on.

At a known point: one given stream, struck after a given event of it, with a few others around it. At a random point:
under 32 streams, at a moment drawn from the seed. What must hold afterwards is `experiment`'s.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from random import Random

import psutil  # type: ignore[import-untyped]
import yaml

from load_tests.chaos.experiment import STREAMS, Experiment, Fault
from load_tests.chaos.fleet import NotInTimeError
from load_tests.chaos.traffic import Outcome, ask, send, text

_AT_TOKEN = 200
_RANDOM_WITHIN_S = 1.5
_VANISHING = 500
_OVERFILL = 10
_SLOW_READERS = 4
_SLOW_SECONDS = 10
_UPDATE_LIMIT_S = 180.0
_NEWCOMERS = 8
_KNOWN_ONLY = ("known",)
_MAY_FAIL = frozenset({Outcome.ERROR})
_MAY_BE_CUT = frozenset({Outcome.ERROR, Outcome.CUT})


def _strike_replica(number: signal.Signals) -> Callable[[Experiment], Awaitable[None]]:
    async def strike(experiment: Experiment) -> None:
        """The replica that has the victim, after its 200th event; or any, at any time."""
        if experiment.moment == "known":
            victim, pid = await experiment.victim()
            await victim.tokens(_AT_TOKEN)
        else:
            await experiment.streams()
            await experiment.random_moment(_RANDOM_WITHIN_S)
            pid = experiment.rng.choice(experiment.fleet.replicas()).pid
        experiment.send_signal(pid, number)

    return strike


async def _kill_in_prefill(experiment: Experiment) -> None:
    """While the victim's prompt of 3,900 tokens is being computed; or while 32 prompts of 1,500 tokens are."""
    if experiment.moment == "known":
        victim, pid = await experiment.victim(tokens=100, prompt=3900)
        experiment.send_signal(pid, signal.SIGKILL)
        if victim.answer.events:
            experiment.row.problems.append("the prefill was over before the strike")
    else:
        await experiment.streams(long_prompts=True)
        await asyncio.sleep(experiment.rng.uniform(0.1, 2.0))
        experiment.send_signal(experiment.rng.choice(experiment.fleet.replicas()).pid, signal.SIGKILL)


async def _kill_twice(experiment: Experiment) -> None:
    """The victim's replica, and when the stream has gone on, the next one: it must end on the third."""
    victim, pid = await experiment.victim(alone=True)
    await victim.tokens(_AT_TOKEN)
    os.kill(pid, signal.SIGKILL)
    await victim.tokens(victim.answer.events + 20)
    experiment.send_signal(await experiment.locate(but=pid), signal.SIGKILL)


async def _kill_all(experiment: Experiment) -> None:
    """All replicas at once: streams may end with a typed error, and the fleet must come back by itself."""
    await _under_way(experiment)
    pids = [process.pid for process in experiment.fleet.replicas()]
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    experiment.send_signal(pids[0], signal.SIGKILL)


async def _under_way(experiment: Experiment) -> None:
    """Nine streams and the victim's 200th event; or 32 streams and any time."""
    if experiment.moment == "known":
        victim, _ = await experiment.victim()
        await victim.tokens(_AT_TOKEN)
    else:
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)


def _kill_one(which: str) -> Callable[[Experiment], Awaitable[None]]:
    async def strike(experiment: Experiment) -> None:
        """The process that is neither replica nor stream."""
        await _under_way(experiment)
        process = getattr(experiment.fleet, which)()[0]
        experiment.send_signal(process.pid, signal.SIGKILL)

    return strike


async def _exhaust_kv(experiment: Experiment) -> None:
    """More tokens running than the pools hold: requests are preempted, and nobody can tell."""
    seats = experiment.fleet.shape.seats * experiment.fleet.shape.replicas
    asks = [ask(f"long {i}", text(experiment.rng, 500), 1000, temperature=1, seed=i, logprobs=1) for i in range(seats)]
    # Undisturbed is each with room to itself: a quarter of them at a time.
    for start in range(0, seats, seats // 4):
        await experiment.learn(asks[start : start + seats // 4])
    before = _preemptions(experiment)
    for a in asks:
        experiment.start(a)
    await experiment.finish()
    preempted = _preemptions(experiment) - before
    experiment.row.notes["preemptions"] = preempted
    if not preempted:
        experiment.row.problems.append("nobody was preempted: the pool was not exhausted")


def _preemptions(experiment: Experiment) -> float:
    return (experiment.fleet.metrics() or {}).get("serve_app_preemptions_total", 0.0)


async def _overfill_queue(experiment: Experiment) -> None:
    """Ten times as many requests at once as the fleet has places for, each of another user."""
    places = experiment.fleet.shape.places
    count = _OVERFILL * places
    asks = [ask(f"one of many {i}", text(experiment.rng, 30), 40) for i in range(60)]
    await experiment.learn(asks)
    crowd = [replace(a, body=a.body | {"user": f"user {i}"}) for i, a in enumerate(islice(cycle(asks), count))]
    # A process's first crowd widens its heap for good; what counts is that the second one finds room there.
    await asyncio.gather(*(send(experiment.session, experiment.fleet.url, a) for a in crowd))
    await experiment.fleet.wait_idle()
    await experiment.take_baseline()
    experiment.struck()
    for a in crowd:
        experiment.start(a)
    await experiment.finish()
    refused = [answer for answer in experiment.answers if answer.outcome is Outcome.ERROR]
    without = [answer for answer in refused if answer.status != 429 or not answer.retry_after_s]
    if without:
        experiment.row.problems.append(f"{len(without)} refusals, not 429 with Retry-After: {without[0].detail}")
    if not refused:
        experiment.row.problems.append("nothing was refused")
    if len(experiment.answers) - len(refused) < places // 2:
        experiment.row.problems.append(f"only {len(experiment.answers) - len(refused)} were served of {places} places")


async def _clients_vanish(experiment: Experiment) -> None:
    """500 clients leave before, during and after the first token, beside streams that stay."""
    stay = await experiment.mixed(experiment.rng, 8, 200)
    for a in stay:
        experiment.start(a)
    experiment.struck()
    gate = asyncio.Semaphore(experiment.fleet.shape.places // 2)

    async def vanish(index: int) -> None:
        async with gate:
            a = ask(f"vanishing {index}", text(experiment.rng, 200), 1000)
            kind = index % 3
            if kind == 2:
                await _leave_after_events(experiment, a.body, 1 + index % 5)
            else:
                # Before: at once. During: while the prompt is computed or waits, by and large.
                wait_s = 0.0 if kind == 0 else experiment.rng.uniform(0.01, 0.2)
                await _leave_after(experiment, a.body, wait_s)

    await asyncio.gather(*(vanish(i) for i in range(_VANISHING)))
    experiment.row.notes["vanished"] = _VANISHING


async def _leave_after_events(experiment: Experiment, body: dict[str, object], events: int) -> None:
    async with experiment.session.post(f"{experiment.fleet.url}/v1/completions", json=body) as response:
        for _ in range(events):
            await response.content.readline()


async def _leave_after(experiment: Experiment, body: dict[str, object], seconds: float) -> None:
    async def post() -> None:
        async with experiment.session.post(f"{experiment.fleet.url}/v1/completions", json=body):
            await asyncio.Event().wait()

    task = asyncio.create_task(post())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _slow_readers(experiment: Experiment) -> None:
    """Clients that read one byte a second must hold up nobody else."""
    others = await experiment.mixed(experiment.rng, 8, 200)
    slow = ask("slow", text(experiment.rng, 50), 2000)
    readers = [asyncio.create_task(_read_slowly(experiment, slow.body)) for _ in range(_SLOW_READERS)]
    await asyncio.sleep(1)
    experiment.struck()
    for a in others:
        experiment.start(a)
    await asyncio.gather(*readers)


async def _read_slowly(experiment: Experiment, body: dict[str, object]) -> None:
    host, port = experiment.fleet.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, (host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(connection, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        for _ in range(_SLOW_SECONDS):
            await asyncio.wait_for(loop.sock_recv(connection, 1), 30)
            await asyncio.sleep(1)
    finally:
        connection.close()


async def _terminate(experiment: Experiment) -> None:
    """SIGTERM to the launcher: running streams end well, newcomers are told so, every process goes."""
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
    experiment.row.problems.extend(f"{a.ask.name} was under way: {a.outcome.value} {a.detail}" for a in unfinished)
    status, left = await asyncio.to_thread(fleet.wait_gone, family)
    if status != 0 or left:
        experiment.row.problems.append(f"the launcher ended with status {status}; {len(left)} processes outlive it")


async def _update(experiment: Experiment) -> None:
    """A rolling update to other settings of the engine, while requests keep coming."""
    asks = await experiment.mixed(Random(8), STREAMS, 120)
    await _under_way(experiment)
    old = {process.pid for process in experiment.fleet.replicas()}
    experiment.struck()
    _change_config(experiment.fleet.config)
    os.kill(experiment.fleet.pid, signal.SIGUSR1)
    deadline = asyncio.get_running_loop().time() + _UPDATE_LIMIT_S
    while asyncio.get_running_loop().time() < deadline:
        await experiment.trickle(asks)
        now = {process.pid for process in experiment.fleet.replicas()}
        if not now & old and len(now) == experiment.fleet.shape.replicas:
            return
    raise NotInTimeError("not in time: all replicas replaced by the update")


async def _lose_node(experiment: Experiment) -> None:
    """All processes of a node at once: killed at the known point; at the random one frozen, which nobody is told."""
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
    # Nobody else can end frozen processes.
    for pid in family:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _node_of(experiment: Experiment, replica: int) -> list[int]:
    """Pids of the raylet that `replica` runs under and of everything below it."""
    for raylet in experiment.fleet.nodes():
        below = [process.pid for process in raylet.children(recursive=True)]
        if replica in below:
            return [raylet.pid, *below]
    raise NotInTimeError(f"no node has the replica {replica}")


def _change_config(path: Path) -> None:
    """Another `engine.max_wait_s` under `args`, which every process is started anew for."""
    config = yaml.safe_load(path.read_text())
    engine = config["applications"][0]["args"]["engine"]
    engine["max_wait_s"] = engine.get("max_wait_s", 1.0) + 0.5
    path.write_text(yaml.safe_dump(config))


FAULTS = (
    Fault("replica SIGKILL in decode", _strike_replica(signal.SIGKILL), stall_limit_s=10),
    Fault("replica SIGKILL in prefill", _kill_in_prefill, stall_limit_s=10),
    Fault("replica SIGSTOP", _strike_replica(signal.SIGSTOP), stall_limit_s=10),
    Fault("replica SIGKILL, then the next", _kill_twice, moments=_KNOWN_ONLY),
    Fault("all replicas SIGKILL", _kill_all, allowed=_MAY_FAIL, recovery_limit_s=60, stall_limit_s=60),
    Fault("ingress SIGKILL", _kill_one("ingress"), allowed=_MAY_BE_CUT, recovery_limit_s=60),
    Fault("controller SIGKILL", _kill_one("controller")),
    Fault("proxy SIGKILL", _kill_one("proxy"), allowed=_MAY_BE_CUT, recovery_limit_s=60),
    Fault("KV pool exhausted", _exhaust_kv, moments=_KNOWN_ONLY, stall_limit_s=120),
    Fault("queue overfilled 10x", _overfill_queue, allowed=_MAY_FAIL, moments=_KNOWN_ONLY, recovery_limit_s=60),
    Fault("500 clients vanish", _clients_vanish, moments=_KNOWN_ONLY),
    Fault("readers of a byte a second", _slow_readers, moments=_KNOWN_ONLY),
    Fault("rolling update", _update, recovery_limit_s=60),
    Fault("node lost", _lose_node, on_nodes=True, stall_limit_s=30),
    Fault("SIGTERM", _terminate, allowed=_MAY_BE_CUT, last=True),
)
