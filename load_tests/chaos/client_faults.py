"""Faults caused by clients: too many tokens or requests, disconnects, slow readers.

At the known point there is little other load. At a random point 32 streams are running, which must
not be affected.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from load_tests.chaos.experiment import Experiment
from load_tests.chaos.fleet import wait_for
from load_tests.chaos.traffic import Answer, Ask, Outcome, ask, open_narrow_session, send, send_into, settle, text

_RANDOM_WITHIN_S = 1.5
_VANISHING = 500
_OVERFILL = 10
_LINE_SLACK = 2
"""Limit of the queue time, relative to the time that the same answers take undisturbed."""
_SLOW_BYTES = 15
_READING_LIMIT_S = 60.0
_BESIDE = 8


async def exhaust_kv(experiment: Experiment) -> None:
    """Run more tokens than the KV pools hold.

    Requests are preempted, and their answers must be the same.
    """
    slots = experiment.fleet.shape.slots * experiment.fleet.shape.replicas
    asks = [ask(f"long {i}", text(experiment.rng, 500), 1000, temperature=1, seed=i, logprobs=1) for i in range(slots)]
    # Undisturbed means with room for each: a quarter of them at a time.
    for start in range(0, slots, slots // 4):
        await experiment.learn(asks[start : start + slots // 4])
    before = _count(experiment, "serve_app_preemptions_total")
    await _others(experiment)
    for a in asks:
        experiment.start(a)
    await experiment.finish()
    preempted = _count(experiment, "serve_app_preemptions_total") - before
    experiment.row.notes["preemptions"] = preempted
    if not preempted:
        experiment.row.problems.append("no request was preempted: the KV pool was not full")


async def overfill_queue(experiment: Experiment) -> None:
    """Send ten times as many requests at once as the fleet holds, each from another user."""
    capacity = experiment.fleet.shape.max_requests
    count = _OVERFILL * capacity
    # Answers long enough that slots stay taken even if requests arrive slowly.
    asks = [ask(f"one of many {i}", text(experiment.rng, 30), 400) for i in range(60)]
    per_answer_s = await experiment.learn(asks) / len(asks)
    crowd = [replace(a, body=a.body | {"user": f"user {i}"}) for i, a in enumerate(islice(cycle(asks), count))]
    # The first burst grows the heap for good. The second one must fit into it.
    await asyncio.gather(*(send(experiment.session, experiment.fleet.url, a) for a in crowd))
    await experiment.fleet.wait_idle()
    await experiment.take_baseline()
    under_way = await _others(experiment)
    experiment.struck()
    # Reading costs more than sending: a client on the fleet's machine would fall behind.
    may_read = asyncio.Event()
    answers = [experiment.start(a, may_read=may_read) for a in crowd]
    await wait_for(lambda: _has_overflowed(answers), "a refusal, or all answered", 60)
    may_read.set()
    await experiment.finish()
    refused = [answer for answer in answers if answer.outcome is Outcome.ERROR]
    problems = experiment.row.problems
    without = [answer for answer in refused if answer.status != 429 or not answer.retry_after_s]
    if without:
        problems.append(f"{len(without)} refusals, not 429 with Retry-After: {without[0].detail}")
    if not refused:
        problems.append("nothing was refused")
    if (served := len(experiment.answers) - len(refused)) < capacity // 2:
        problems.append(f"only {served} requests were served; the fleet holds {capacity}")
    # The last request of a full queue waits for all before it, however fast the machine is.
    line_s = served * per_answer_s
    experiment.wait_limit_s = max(experiment.wait_limit_s, _LINE_SLACK * line_s)
    experiment.row.notes["line_undisturbed_s"] = round(line_s, 1)
    problems.extend(f"{a.ask.name} was running: {a.detail}" for a in under_way if a.outcome is Outcome.ERROR)


def _has_overflowed(answers: Sequence[Answer]) -> bool:
    statuses = {answer.status for answer in answers}
    return None not in statuses or not statuses <= {None, 200}


async def vanish(experiment: Experiment) -> None:
    """Let 500 clients disconnect before, during and after the first token, beside streams that
    stay."""
    await _others(experiment)
    if experiment.moment == "known":
        for a in await experiment.mixed(experiment.rng, _BESIDE, 200):
            experiment.start(a)
    before = _ended(experiment, "cancelled", "overloaded")
    refused_before = _ended(experiment, "overloaded")
    experiment.struck()
    gate = asyncio.Semaphore(experiment.fleet.shape.max_requests // 2)

    async def client(index: int) -> None:
        async with gate:
            a = ask(f"vanishing {index}", text(experiment.rng, 200), 1000)
            if experiment.moment == "random":
                await _leave(experiment, a, wait_s=experiment.rng.uniform(0, 1))
            elif index % 3 == 2:
                await _leave(experiment, a, events=1 + index % 5)
            else:
                # Before: as soon as the request is written. During: mostly while the prompt is
                # queued or computed.
                await _leave(experiment, a, wait_s=0.0 if index % 3 == 0 else experiment.rng.uniform(0.01, 0.2))

    await asyncio.gather(*(client(i) for i in range(_VANISHING)))
    await wait_for(lambda: _count(experiment, "serve_app_requests_active") <= _staying(experiment), "all forgotten", 30)
    # Ray's Python proxy drops requests whose client disconnects before their turn. On a busy
    # machine few remain.
    experiment.row.notes["reached"] = reached = _ended(experiment, "cancelled", "overloaded") - before
    if not reached:
        experiment.row.problems.append(f"none of {_VANISHING} was counted as cancelled or refused")
    refused = _ended(experiment, "overloaded") - refused_before
    experiment.row.notes["vanished"] = _VANISHING
    # A disconnected client's request keeps its slot until the server detects the disconnect. On a
    # busy machine they can fill slots and queue.
    experiment.row.notes["refused"] = refused
    if refused > _VANISHING // 2:
        experiment.row.problems.append(
            f"{refused:.0f} of {_VANISHING} were refused: disconnected clients kept their slots"
        )


async def _leave(experiment: Experiment, a: Ask, wait_s: float = 0.0, events: int = 0) -> None:
    """Write a whole request, wait for a time or for events of the stream, and disconnect.

    If the request is refused, disconnects at once.
    """
    host, port = experiment.fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(a.body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    await asyncio.sleep(wait_s)
    refused = bool(events) and b" 200 " not in await reader.readline()
    while events and not refused and (line := await reader.readline()):
        events -= line.startswith(b"data:")
    writer.close()


async def read_slowly(experiment: Experiment) -> None:
    """Fill all slots and engine queues with clients that read one byte per second.

    Others must not be affected, and no token may be lost.
    """
    shape = experiment.fleet.shape
    count = shape.replicas * (shape.slots + shape.waiting)
    # Much JSON for few tokens: only answers larger than the buffers on the way can block a server.
    slow = ask("slow", text(experiment.rng, 50), 600, temperature=1, seed=3, logprobs=5)
    beside = await experiment.mixed(experiment.rng, _BESIDE, 200)
    await experiment.learn([slow])
    await _others(experiment)
    answers = [Answer(replace(slow, body=slow.body | {"user": f"slow {i}"})) for i in range(count)]
    async with open_narrow_session() as session:
        reading = [
            asyncio.create_task(send_into(answer, session, experiment.fleet.url, slow_bytes=_SLOW_BYTES))
            for answer in answers
        ]
        await asyncio.sleep(1)
        experiment.struck()
        for a in beside:
            experiment.start(a)
        await experiment.finish()
        experiment.row.notes["readers_held_up"] = _count(experiment, "serve_app_requests_active")
        await settle(reading, _READING_LIMIT_S)
    experiment.answers.extend(answers)


def _staying(experiment: Experiment) -> int:
    return sum(answer.outcome is Outcome.HUNG for answer in experiment.answers)


async def _others(experiment: Experiment) -> list[Answer]:
    """At a random point, start 32 streams, wait for a random moment and return their answers."""
    if experiment.moment == "random":
        await experiment.streams()
        await experiment.random_moment(_RANDOM_WITHIN_S)
    return list(experiment.answers)


def _count(experiment: Experiment, name: str, **labels: str) -> float:
    return (experiment.fleet.metrics(**labels) or {}).get(name, 0.0)


def _ended(experiment: Experiment, *outcomes: str) -> float:
    return sum(_count(experiment, "serve_app_requests_total", outcome=outcome) for outcome in outcomes)
