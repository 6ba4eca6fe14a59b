"""A fleet of three is told to end under load. The name sorts this file behind those whose tests
need that fleet."""

import httpx
import pytest

from load_tests.chaos.experiment import References
from load_tests.chaos.fleet import Fleet
from tests.chaos.test_faults import strike
from tests.fleets import change
from tests.serving.conftest import wait_for


def ingresses(fleet: Fleet) -> int:
    """As Prometheus is told by whichever ingress it asks."""
    targets = httpx.get(f"{fleet.url}/metrics/targets").json()
    addresses = {target["targets"][0] for target in targets if target["labels"]["deployment"] == "Ingress"}
    return len(addresses)


@pytest.mark.cluster
@pytest.mark.parametrize("fleet", ["fast"], indirect=True)
async def test_streams_under_way_end_well_and_every_process_goes(fleet: Fleet, references: References) -> None:
    """Also those of a second ingress."""
    change(fleet, "Ingress", num_replicas=2)
    wait_for(lambda: ingresses(fleet) == 2 == len(fleet.ingress()), "two ingress replicas")
    await strike(fleet, references, "SIGTERM", "random")
