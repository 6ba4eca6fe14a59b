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

# Each path raises other exceptions when a replica dies; what clients do meets the same code on both.
# SIGTERM is the last of its path: the fleet is gone afterwards.
EXPERIMENTS = [
    ("fast", "replica SIGKILL in decode", "random"),
    ("fast", "replica SIGSTOP", "known"),
    ("fast", "ingress SIGKILL", "known"),
    ("fast", "queue overfilled 10x", "known"),
    ("fast", "SIGTERM", "random"),
    ("default", "replica SIGKILL in decode", "random"),
    ("default", "replica SIGKILL in prefill", "known"),
]
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
async def fleet(
    request: pytest.FixtureRequest, model: str, references: References, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    async with serving(request.param, model, tmp_path_factory.mktemp("fleet"), Shape()) as fleet:
        await warm_up(fleet, references)
        yield fleet


@pytest.mark.parametrize(("fleet", "name", "moment"), EXPERIMENTS, indirect=["fleet"])
async def test_clients_notice_no_more_than_they_must(
    fleet: Fleet, references: References, name: str, moment: str
) -> None:
    row = await Experiment(fleet, BY_NAME[name], moment, references, seed=0).run()
    assert row.problems == []
    assert row.requests > 0
