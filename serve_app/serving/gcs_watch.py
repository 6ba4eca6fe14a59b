"""Checks whether Ray's GCS answers.

Requests do not need it; replacing replicas, updates and scaling do.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.errors import UnavailableError
from serve_app.serving.ray_patches import gcs_answers

logger = logging.getLogger(__name__)

_PERIOD_S, _ANSWER_S = 1.0, 2.0
_UNANSWERED = 3
_REMINDER_S = 30.0


class GcsWatch:
    """Asks the GCS once a second.

    Not ready from three unanswered requests in a row until the next answer.
    """

    def __init__(self, ask: Callable[[float], bool] = gcs_answers, clock: Callable[[], float] = time.monotonic) -> None:
        """`ask(timeout_s)`: whether the GCS answered, blocking. `clock`: returns seconds."""
        self._ask = ask
        self._clock = clock
        self._unanswered = 0
        self._answered_at = clock()
        self._next_report = 0.0

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.note(await asyncio.to_thread(self._ask, _ANSWER_S))

    def note(self, answered: bool) -> None:
        """Record whether a request was answered."""
        now = self._clock()
        if answered:
            if self.is_silent:
                logger.warning("Ray's GCS answers again after %.0f s", now - self._answered_at)
            self._unanswered, self._answered_at, self._next_report = 0, now, 0.0
            return
        self._unanswered += 1
        if self.is_silent and now >= self._next_report:
            self._next_report = now + _REMINDER_S
            silence = now - self._answered_at
            logger.error(
                "Ray's GCS has not answered for %.0f s: requests are served, but lost replicas are not replaced",
                silence,
            )

    @property
    def is_silent(self) -> bool:
        """Whether the last three or more requests were not answered."""
        return self._unanswered >= _UNANSWERED

    def check_ready(self) -> None:
        """Raise `UnavailableError` while the GCS is silent."""
        if self.is_silent:
            raise UnavailableError("Ray's GCS does not answer: lost replicas are not replaced")
