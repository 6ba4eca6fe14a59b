"""The chaos suite in short: three real replicas, struck from outside under load. `make chaos` runs all of it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from load_tests.chaos.experiment import Experiment, References
from load_tests.chaos.faults import FAULTS
from load_tests.chaos.fleet import Fleet, Shape, serving
from load_tests.chaos.small_model import write_small_model
from load_tests.chaos.suite import warm_up

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_small_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def references() -> References:
    """What undisturbed servers say, whichever path they are on."""
    return References()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fast_fleet(
    model: str, references: References, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    async with serving("fast", model, tmp_path_factory.mktemp("fast"), Shape()) as fleet:
        await warm_up(fleet, references)
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def default_fleet(
    model: str, references: References, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    async with serving("default", model, tmp_path_factory.mktemp("default"), Shape()) as fleet:
        await warm_up(fleet, references)
        yield fleet


async def strike(fleet: Fleet, references: References, name: str, moment: str) -> None:
    row = await Experiment(fleet, BY_NAME[name], moment, references, seed=0).run()
    assert row.problems == []
    assert row.requests > 0


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("replica SIGKILL in decode", "random"),
        ("replica SIGSTOP", "known"),
        ("ingress SIGKILL", "known"),
        ("queue overfilled 10x", "known"),
        ("SIGTERM", "random"),  # the last one: the fleet is gone afterwards
    ],
)
async def test_on_the_fast_path(fast_fleet: Fleet, references: References, name: str, moment: str) -> None:
    await strike(fast_fleet, references, name, moment)


# Replicas die with other exceptions here; what clients do meets the same code.
@pytest.mark.parametrize(
    ("name", "moment"), [("replica SIGKILL in decode", "random"), ("replica SIGKILL in prefill", "known")]
)
async def test_on_the_default_path(default_fleet: Fleet, references: References, name: str, moment: str) -> None:
    await strike(default_fleet, references, name, moment)
