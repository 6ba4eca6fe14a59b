"""Asks every ingress to take no new requests and to finish the running ones.

Ray finds an ingress through its GCS. The handles are made while that lives, so that the ingresses can still be asked
when it is lost.
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
    """Every ingress replica of each of our applications."""

    def __init__(self, applications: Collection[str]) -> None:
        """Returns once each has answered, or 10 s later: one that does not live has nothing to drain."""
        self._applications = applications
        self._handles: dict[str, Any] = {}
        with suppress(Exception):  # of Ray's, whatever it is
            self._ask("record_replica_metadata", _ANSWER_S)

    def drain(self, limit_s: float) -> None:
        """Drain all at once, each for at most `limit_s` seconds; then its running requests end with an error.

        Raises what Ray raises for one that does not live.
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
    # By the deployment's name: an application that is being built has no ingress that Ray would tell.
    handle: Any = serve.get_deployment_handle(INGRESS, application)
    use_in_any_thread(handle)
    return handle
