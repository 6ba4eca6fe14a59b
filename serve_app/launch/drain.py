"""Asks every ingress to take no new requests and to finish the running ones.

Ray finds an ingress through its GCS. The handles are created while the GCS is up, so that the
ingresses can still be asked after its loss.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ray import serve

from serve_app.launch.config_file import INGRESS
from serve_app.serving.ray_patches import use_in_any_thread

# How much longer than its own time limit a drain may take to answer.
_DRAIN_ANSWER_S = 10.0
_ANSWER_S = 10.0


class Ingresses:
    """All ingress replicas of our applications."""

    def __init__(self, applications: Collection[str]) -> None:
        """Wait up to 10 s until each ingress has answered. Dead ones have nothing to drain."""
        self._applications = applications
        self._handles: dict[str, Any] = {}
        with suppress(Exception):  # any of Ray's errors
            self._ask("record_replica_metadata", _ANSWER_S)

    def drain(self, limit_s: float) -> None:
        """Drain all ingresses in parallel, each for at most `limit_s` seconds.

        After that, their running requests end with an error. Raises Ray's error for a dead ingress.
        """
        self._ask("drain", limit_s + _DRAIN_ANSWER_S)

    def _ask(self, method: str, limit_s: float) -> None:
        def ask(application: str) -> list[Any]:
            if application not in self._handles:
                self._handles[application] = _handle(application)
            return list(self._handles[application].broadcast(method).results(timeout_s=limit_s, return_exceptions=True))

        with ThreadPoolExecutor(max_workers=max(1, len(self._applications))) as pool:
            answers = [answer for answers in pool.map(ask, self._applications) for answer in answers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer


def _handle(application: str) -> Any:
    # Use the deployment's name: Ray does not report the ingress of an application that is being
    # built.
    handle: Any = serve.get_deployment_handle(INGRESS, application)
    use_in_any_thread(handle)
    return handle
