"""A rolling update of a running fleet, the way an operator does it: `serve run` once more, with another config."""

import re

import psutil  # type: ignore[import-untyped]
import yaml

from load_tests.chaos.fleet import Fleet, submit


async def redeploy(fleet: Fleet) -> None:
    """Submit the fleet's config with another `engine.max_wait_s`, which every replica is started anew for.

    Returns when Serve has taken it. Raises `RuntimeError` when it does not.
    """
    config = yaml.safe_load(fleet.config.read_text())
    engine = config["applications"][0]["args"]["engine"]
    engine["max_wait_s"] = engine.get("max_wait_s", 1.0) + 0.5
    fleet.config.write_text(yaml.safe_dump(config))
    await submit(fleet.config, gcs_address(fleet), fleet.environment | _switches(fleet))


def gcs_address(fleet: Fleet) -> str:
    """Where the fleet's Ray cluster listens for drivers."""
    command = " ".join(fleet.processes(r"/gcs_server ")[0].cmdline())
    found = re.search(r"--gcs_server_port=(\d+)", command)
    if found is None:
        raise RuntimeError(f"no port in {command}")
    return f"127.0.0.1:{found[1]}"


def _switches(fleet: Fleet) -> dict[str, str]:
    """The switches that the fleet's own processes run with: a driver must agree with them."""
    controller: psutil.Process = fleet.controller()[0]
    return {name: value for name, value in controller.environ().items() if name.startswith("RAY_SERVE_")} | {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"
    }
