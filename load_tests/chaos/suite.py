"""All experiments, one after another, on one fleet per path."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from load_tests.chaos.experiment import PROBE, Experiment, Fault, References, Row
from load_tests.chaos.fleet import Fleet, Shape, serving, serving_on_nodes
from load_tests.chaos.traffic import open_session


async def run_faults(
    faults: Sequence[Fault], path: str, moments: Sequence[str], model: str, folder: Path, seed: int
) -> AsyncIterator[Row]:
    """Every fault at each of its moments, on a fleet started for it all; faults that end the fleet come last."""
    experiments = [(fault, moment) for fault in faults for moment in fault.moments if moment in moments]
    references = References()
    for batch in _batches(experiments):
        start = serving_on_nodes if batch[0][0].on_nodes else serving
        async with start(path, model, folder, Shape()) as fleet:
            await warm_up(fleet, references)
            for fault, moment in batch:
                yield await Experiment(fleet, fault, moment, references, seed).run()


async def warm_up(fleet: Fleet, references: References) -> None:
    """First times cost memory and threads that nobody leaked: have them over before anything is compared."""
    async with open_session() as session:
        await references.learn(session, fleet.url, [PROBE])


def _batches(experiments: Sequence[tuple[Fault, str]]) -> list[list[tuple[Fault, str]]]:
    """Experiments that share a fleet: on one node or on several; a fault that ends it is the last of its batch."""
    one_node = [experiment for experiment in experiments if not experiment[0].on_nodes]
    batches: list[list[tuple[Fault, str]]] = [[]]
    for fault, moment in sorted(one_node, key=lambda experiment: experiment[0].last):
        batches[-1].append((fault, moment))
        if fault.last:
            batches.append([])
    batches.append([experiment for experiment in experiments if experiment[0].on_nodes])
    return [batch for batch in batches if batch]
