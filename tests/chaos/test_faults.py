"""The chaos suite in short: three real replicas, struck from outside under load. `make chaos` runs all of it."""

from collections.abc import AsyncIterator

import pytest

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


@pytest.fixture(scope="module", params=["fast", "default"])
async def fleet(
    request: pytest.FixtureRequest, model: str, references: References, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    async with serving(request.param, model, tmp_path_factory.mktemp("fleet"), Shape()) as fleet:
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
        ("replica SIGKILL in prefill", "known"),
        ("replica SIGSTOP", "known"),
        ("ingress SIGKILL", "known"),
    ],
)
async def test_a_process_is_struck(fleet: Fleet, references: References, name: str, moment: str) -> None:
    await strike(fleet, references, name, moment)


@pytest.mark.parametrize("name", ["queue overfilled 10x", "500 clients vanish", "readers of a byte a second"])
async def test_clients_misbehave(fleet: Fleet, references: References, name: str) -> None:
    if fleet.path == "default":
        pytest.skip("what clients do meets the same code on both paths; `make chaos` tries both")
    await strike(fleet, references, name, "known")


async def test_sigterm_under_load(fleet: Fleet, references: References) -> None:
    """Last of its path: the fleet is gone afterwards."""
    await strike(fleet, references, "SIGTERM", "random")
