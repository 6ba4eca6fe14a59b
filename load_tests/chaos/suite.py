"""All experiments, one after another, on one fleet per path."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from load_tests.chaos.experiment import PROBE, Experiment, Fault, References, Row
from load_tests.chaos.fleet import Fleet, Shape, serving, serving_on_nodes
from load_tests.chaos.traffic import open_session


async def run_faults(
    faults: Sequence[Fault], path: str, moments: Sequence[str], model: str, folder: Path, seed: int
) -> AsyncIterator[Row]:
    """Run every fault at each of its moments, on shared fleets.

    Faults that end their fleet come last.
    """
    experiments = [(fault, moment) for fault in faults for moment in fault.moments if moment in moments]
    references = References()
    for batch in _batches(experiments):
        start = serving_on_nodes if batch[0][0].on_nodes else serving
        async with start(path, model, folder, batch[0][0].shape) as fleet:
            await warm_up(fleet, references)
            for fault, moment in batch:
                yield await Experiment(fleet, fault, moment, references, seed).run()


async def warm_up(fleet: Fleet, references: References) -> None:
    """Send a first request. It allocates memory and threads that would later look like a leak."""
    async with open_session() as session:
        await references.learn(session, fleet.url, [PROBE])


def _batches(experiments: Sequence[tuple[Fault, str]]) -> list[list[tuple[Fault, str]]]:
    """Return the experiments grouped by the shape and kind of their fleet.

    A fault that ends it comes last.
    """
    batches: list[list[tuple[Fault, str]]] = []
    fleets: dict[tuple[bool, Shape], list[tuple[Fault, str]]] = {}
    for fault, moment in sorted(experiments, key=lambda experiment: experiment[0].last):
        kind = fault.on_nodes, fault.shape
        if kind not in fleets:
            fleets[kind] = []
            batches.append(fleets[kind])
        fleets[kind].append((fault, moment))
        if fault.last:
            del fleets[kind]
    return batches
