"""Queries Serve about the progress and failures of applications, and deletes applications."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from serve_app.environment import ray_temporary_folder
from serve_app.launch.config_file import INGRESS

_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class DeploymentError(Exception):
    """Serve has given up on an application. The message is one line."""


def logs_folder() -> str:
    """Return the folder of Ray's logs, which contain what the terminal does not show."""
    return f"{ray_temporary_folder()}/ray/session_latest/logs"


def is_running(applications: Collection[str]) -> bool:
    """Whether all applications run. Raises `DeploymentError` if one never will.

    If replicas only failed health checks, returns False: Ray replaces them.
    """
    from ray import serve

    states: Any = serve.status().applications
    for name in applications:
        if name in states and states[name].status in _FAILED:
            deployments = states[name].deployments.values()
            reasons = [deployment.status_trigger for deployment in deployments if deployment.status in _FAILED]
            if reasons and all(reason == "HEALTH_CHECK_FAILED" for reason in reasons):
                return False
            parts = [states[name].message, *(deployment.message for deployment in deployments)]
            raise DeploymentError(f"deployment failed: {find_cause(parts)} (logs: {logs_folder()})")
    return all(name in states and states[name].status == "RUNNING" for name in applications)


def has_stopping_ingress(applications: Collection[str]) -> bool:
    """Whether an ingress that an update replaced is still draining."""
    from ray import serve

    known = serve.status().applications
    ingresses = (known[name].deployments.get(INGRESS) for name in applications if name in known)
    return any(ingress is not None and ingress.replica_states.get("STOPPING") for ingress in ingresses)


def delete(application: str) -> None:
    """Make Serve delete the application."""
    from ray import serve

    serve.delete(application)


def find_cause(reports: Iterable[str]) -> str:
    """Return the line of Ray's reports that states the cause.

    A `ConfigError` if there is one, else the last exception.
    """
    lines = [line.strip() for report in reports for line in report.splitlines() if line.strip()]
    for pattern in (r"(?:\w+\.)*ConfigError: (.+)", r"((?:\w+\.)*\w+(?:Error|Exception): .+)"):
        for line in reversed(lines):
            if (found := re.fullmatch(pattern, line)) is not None:
                return found[1][:500]
    return lines[-1][:500] if lines else "no reason given"
