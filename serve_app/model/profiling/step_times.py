"""Measures the duration of steps of some shapes on this machine at start.

Decides how often to run each step and which of its times counts. Does not decide what follows from
them.
"""

import math
import time
from collections.abc import Callable

import torch

from serve_app.core.autosize import SEQUENCE_TOKENS
from serve_app.core.step_cost import DeviceLimits
from serve_app.errors import ConfigError
from serve_app.model.runner import ModelRunner

_REPEATS = 2
_ENOUGH_S = 0.2
"""Seconds of running after which a step is not repeated in the same measurement."""
_LONG_S = 0.5
"""A step that takes this long runs only once, to keep the start short."""


class StepTimes:
    """Step times of one runner in seconds: the minimum of all measurements, because other work only
    makes steps slower.

    Each call measures its step again, so that a time that matters can be confirmed.
    """

    def __init__(self, runner: ModelRunner, limits: DeviceLimits | None) -> None:
        """limits: give the time to read keys. None: that time counts as 0."""
        self._runner = runner
        self._keys_s = 0.0 if limits is None else runner.model.cost.kv_bytes * SEQUENCE_TOKENS / limits.bytes_per_s
        self._least: dict[tuple[str, int, int], float] = {}

    def largest(self, num_tokens: int, num_rows: int) -> float:
        """Return the time of the largest possible step with this many tokens and rows, without keys
        of earlier steps.

        Raises ConfigError if there is not enough memory for it.
        """
        runner = self._runner
        num_tokens = min(num_tokens, num_rows * runner.model.max_model_len)
        try:
            return self._measure(("largest", num_tokens, num_rows), lambda: runner.profile_step(num_tokens, num_rows))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"max_num_batched_tokens: a step of {num_tokens} tokens does not fit into the memory of "
                f"{runner.model.device}; lower it"
            ) from error

    def decodes(self, num_rows: int, num_drafts: int = 0) -> float:
        """Return the time of a step of `num_rows` decodes of typical length, each with `num_drafts`
        drafts.
        """
        step_s = self._measure(
            ("decodes", num_rows, num_drafts), lambda: self._runner.profile_decodes(num_rows, num_drafts)
        )
        # Measured without keys: the cache cannot hold the keys of that many rows.
        return step_s + num_rows * self._keys_s

    def _measure(self, shape: tuple[str, int, int], step: Callable[[], None]) -> float:
        least, spent = self._least.get(shape, math.inf), 0.0
        # A GPU's first run may include kernel compilation.
        on_cpu = self._runner.model.device.type == "cpu"
        for _ in range(_REPEATS):
            if on_cpu and (spent >= _ENOUGH_S or _LONG_S <= least < math.inf):
                break
            seconds = _time(step)
            least, spent = min(least, seconds), spent + seconds
        self._least[shape] = least
        return least


def _time(step: Callable[[], None]) -> float:
    started_at = time.perf_counter()
    step()
    return time.perf_counter() - started_at
