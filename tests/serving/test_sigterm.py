"""A fleet of three is told to end under load. The name sorts this file behind those whose tests need that fleet."""

import pytest

from load_tests.chaos.experiment import References
from load_tests.chaos.fleet import Fleet
from tests.chaos.test_faults import strike


@pytest.mark.cluster
@pytest.mark.parametrize("fleet", ["fast"], indirect=True)
async def test_streams_under_way_end_well_and_every_process_goes(fleet: Fleet, references: References) -> None:
    await strike(fleet, references, "SIGTERM", "random")
