"""Three real replicas of a small model on each of Ray's two paths, for every test that strikes or
only asks a fleet.

Starting one takes half a minute, so there is one for the session; pytest brings the tests of each
path together.
Tests leave it whole, but for `SIGTERM`'s, which is the last of its path.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from load_tests.chaos.experiment import References
from load_tests.chaos.fleet import Fleet, Shape, serving
from load_tests.chaos.small_model import write_small_model
from load_tests.chaos.suite import warm_up
from tests.serving.conftest import wait_for


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_small_model(folder)
    return folder


@pytest.fixture(scope="session")
def references() -> References:
    """What undisturbed fleets say, whichever path they are on."""
    return References()


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, small_model: Path, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """On the path that the parameter names, "fast" or "default"."""
    folder = tmp_path_factory.mktemp(request.param)
    with asyncio.Runner() as runner:
        started = serving(request.param, str(small_model), folder, Shape())
        fleet = runner.run(started.__aenter__())
        try:
            runner.run(warm_up(fleet, references))
            yield fleet
        finally:
            runner.run(started.__aexit__(None, None, None))
    # Ray waits for calls that are open, for half a minute.
    assert "failed to shut down" not in (folder / f"{request.param}.log").read_text()


def change(fleet: Fleet, deployment: str, **options: Any) -> None:
    """Other options for one of its deployments, as an operator changes them; returns when they
    hold."""
    config = yaml.safe_load(fleet.config.read_text())
    application = config["applications"][0]
    others = [entry for entry in application.get("deployments", ()) if entry["name"] != deployment]
    application["deployments"] = [*others, {"name": deployment, **options}]
    fleet.config.write_text(yaml.safe_dump(config))
    log = fleet.config.with_suffix(".log")
    deployed = log.read_text().count(" deployed\n")
    os.kill(fleet.pid, signal.SIGUSR1)
    wait_for(lambda: log.read_text().count(" deployed\n") > deployed, f"{deployment} is changed", timeout_s=60)
