"""How a server ends: no new requests, the running ones to their end, applications that are not ours deleted."""

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
# How long Ray may take to answer a question, or to delete an application.
_ANSWER_S, _DELETE_S = 10.0, 60.0
# For the ends of streams that HAProxy has and the clients have not.
_LAST_BYTES_S = 1.0


class Ending:
    """Drains the applications of a config file, with Ray or without the part of it that was lost."""

    def __init__(self, target: Callable[[], ConfigFile], say: Callable[[str], None]) -> None:
        """target: the config file as it is then; say: tells the operator."""
        self._target, self._say = target, say
        self._prepared: Ingresses | None = None

    def ingresses(self) -> "Ingresses":
        """Kept for the loss of Ray's GCS, without which they cannot be found."""
        from serve_app.launch.drain import Ingresses

        self._prepared = Ingresses(self._target().ours)
        return self._prepared

    def drain_without_ray(self) -> None:
        """Ask the ingresses that were found before. Raises nothing."""
        if self._prepared is not None:
            with suppress(Exception):  # of Ray's, whatever it is
                self._prepared.drain(self._limit_s)
            time.sleep(_LAST_BYTES_S)

    def drain(self) -> None:
        """Take no new requests, let the running ones finish or end them with an error.

        Our applications stay, to refuse whoever comes, until `serve run` stops HAProxy, which would cut every stream.
        Others have no drain of their own; deleting them is theirs.
        """
        self._say("stopping: no new requests, waiting for the running ones")
        target, limit_s = self._target(), self._limit_s
        deadline = time.monotonic() + limit_s
        rays = BoundedCalls(self._say)  # no call to a controller that is away holds up the ingress's
        try:
            rays.call(lambda: self.ingresses().drain(limit_s), limit_s + 3 * _ANSWER_S)
            while rays.call(partial(has_stopping_ingress, target.ours), _ANSWER_S):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
        except Exception as error:  # of Ray's, whatever it is: an ingress that does not live has nothing to drain
            self._say(f"draining failed: {first_line(error)}")
        time.sleep(_LAST_BYTES_S)
        for name in set(target.applications) - target.ours.keys():
            rays.attempt(f"{name} was not deleted", partial(delete, name), None, _DELETE_S)

    @property
    def _limit_s(self) -> float:
        return max((settings.ingress.drain_timeout_s for settings in self._target().ours.values()), default=0.0)
