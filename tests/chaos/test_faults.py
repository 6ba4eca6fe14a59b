"""The chaos suite in short: three real replicas, struck from outside under load. `make chaos` runs
all of it.

Not the proxy and the GCS, which `tests/launch/test_lost_processes.py` has. SIGTERM's is
`tests/serving/test_sigterm.py`: it must be the last test of its fleet.
"""

import pytest

from load_tests.chaos.experiment import Experiment, References
from load_tests.chaos.faults import FAULTS
from load_tests.chaos.fleet import Fleet

pytestmark = pytest.mark.cluster


async def strike(fleet: Fleet, references: References, name: str, moment: str) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    row = await Experiment(fleet, fault, moment, references, seed=0).run()
    print(row)
    assert row.problems == []
    assert row.requests > 0


@pytest.mark.parametrize("fleet", ["fast"], indirect=True)
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("replica SIGKILL in decode", "random"),
        ("replica SIGSTOP", "known"),
        ("ingress SIGKILL", "known"),
        ("controller SIGKILL", "known"),
        pytest.param("queue overfilled 10x", "known", marks=pytest.mark.slow),
        pytest.param("update: knobs, and a kill", "known", marks=pytest.mark.slow),
    ],
)
async def test_on_the_fast_path(fleet: Fleet, references: References, name: str, moment: str) -> None:
    await strike(fleet, references, name, moment)


# Replicas die with other exceptions here; what clients do meets the same code.
@pytest.mark.parametrize("fleet", ["default"], indirect=True)
@pytest.mark.parametrize(
    ("name", "moment"), [("replica SIGKILL in decode", "random"), ("replica SIGKILL in prefill", "known")]
)
async def test_on_the_default_path(fleet: Fleet, references: References, name: str, moment: str) -> None:
    await strike(fleet, references, name, moment)
