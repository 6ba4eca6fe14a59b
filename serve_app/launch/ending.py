"""Ends a server: refuses new requests, finishes running ones, deletes other applications."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from serve_app.launch.bounded import BoundedCalls, first_line
from serve_app.launch.config_file import ConfigFile
from serve_app.launch.deployment import delete, has_stopping_ingress

if TYPE_CHECKING:
    from serve_app.launch.drain import Ingresses

_POLL_S = 0.25
# How long Ray may take to answer a query, or to delete an application.
_ANSWER_S, _DELETE_S = 10.0, 60.0
# Time for the ends of streams to get from HAProxy to the clients.
_LAST_BYTES_S = 1.0


class Ending:
    """Drains the applications of a config file, with Ray or after the loss of Ray's GCS."""

    def __init__(self, target: Callable[[], ConfigFile], say: Callable[[str], None]) -> None:
        """`target` returns the current config file; `say` prints a line."""
        self._target, self._say = target, say
        self._prepared: Ingresses | None = None

    def ingresses(self) -> "Ingresses":
        """Find the ingresses, and keep them for a later loss of Ray's GCS."""
        from serve_app.launch.drain import Ingresses

        self._prepared = Ingresses(self._target().ours)
        return self._prepared

    def drain_without_ray(self) -> None:
        """Ask the ingresses found earlier to drain. Raises nothing."""
        if self._prepared is not None:
            with suppress(Exception):  # any of Ray's errors
                self._prepared.drain(self._limit_s)
            time.sleep(_LAST_BYTES_S)

    def drain(self) -> None:
        """Take no new requests and finish the running ones, up to the time limit.

        After the limit, they end with an error. Our applications stay up to refuse new requests
        until `serve run` stops HAProxy, which would cut every stream. Other applications have no
        drain of their own, so they are deleted.
        """
        self._say("stopping: no new requests, waiting for the running ones")
        target, limit_s = self._target(), self._limit_s
        deadline = time.monotonic() + limit_s
        rays = BoundedCalls(self._say)  # a lost controller must not block the ingresses' calls
        try:
            rays.call(lambda: self.ingresses().drain(limit_s), limit_s + 3 * _ANSWER_S)
            while rays.call(partial(has_stopping_ingress, target.ours), _ANSWER_S):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
        except Exception as error:  # any of Ray's errors: a dead ingress has nothing to drain
            self._say(f"draining failed: {first_line(error)}")
        time.sleep(_LAST_BYTES_S)
        for name in set(target.applications) - target.ours.keys():
            rays.attempt(f"{name} was not deleted", partial(delete, name), None, _DELETE_S)

    @property
    def _limit_s(self) -> float:
        return max((settings.ingress.drain_timeout_s for settings in self._target().ours.values()), default=0.0)
