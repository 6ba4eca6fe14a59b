"""What Serve is told and asked about applications: how far they are, why it has given one up, that they shall end."""

import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from serve_app.launch.config_file import INGRESS

_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class DeploymentError(Exception):
    """Serve has given up on an application; the message is one line."""


def is_running(applications: Collection[str], logs: str) -> bool:
    """Whether all applications run. Raises `DeploymentError` if one never will, which names the folder of the `logs`.

    One that only lacks a replica that died will: Ray replaces it.
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
            raise DeploymentError(f"deployment failed: {find_cause(parts)} (logs: {logs})")
    return all(name in states and states[name].status == "RUNNING" for name in applications)


def drain(applications: Collection[str], limit_s: float) -> None:
    """Every ingress replica of these applications of ours, all at once; returns once nothing runs there.

    Raises whatever one of them raises, or Ray, and `TimeoutError` after `limit_s` seconds.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(applications))) as pool:
        answers = [answer for answers in pool.map(partial(_drain, limit_s), applications) for answer in answers]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _drain(limit_s: float, application: str) -> list[Any]:
    from ray import serve

    from serve_app.serving.ray_patches import use_in_any_thread

    # By the deployment's name: an application that is being built has no ingress that Ray would tell.
    handle: Any = serve.get_deployment_handle(INGRESS, application)
    use_in_any_thread(handle)
    return list(handle.broadcast("drain").results(timeout_s=limit_s, return_exceptions=True))


def has_stopping_ingress(applications: Collection[str]) -> bool:
    """Whether there is one that an update has just replaced; it drains by itself."""
    from ray import serve

    known = serve.status().applications
    ingresses = (known[name].deployments.get(INGRESS) for name in applications if name in known)
    return any(ingress is not None and ingress.replica_states.get("STOPPING") for ingress in ingresses)


def delete(application: str) -> None:
    """Have Serve stop it."""
    from ray import serve

    serve.delete(application)


def find_cause(reports: Iterable[str]) -> str:
    """The one line of Ray's reports that says what went wrong: a `ConfigError` if there is one, else any exception."""
    lines = [line.strip() for report in reports for line in report.splitlines() if line.strip()]
    for pattern in (r"(?:\w+\.)*ConfigError: (.+)", r"((?:\w+\.)*\w+(?:Error|Exception): .+)"):
        for line in reversed(lines):
            if (found := re.fullmatch(pattern, line)) is not None:
                return found[1][:500]
    return lines[-1][:500] if lines else "no reason given"
