"""How long steps of some shapes take on this machine, measured at start.

Decides how often a step is run for that and which of its times counts; what follows from them, others decide.
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
"""Having run so long, a step isn't repeated at once."""
_LONG_S = 0.5
"""A step that takes longer is run for one time only: a start has no time to repeat it."""


class StepTimes:
    """Seconds of steps of one runner, the least of all measurements: whatever else a machine does only adds to them.

    Asked again for a step, it is measured again, so that a time that counts can be confirmed.
    """

    def __init__(self, runner: ModelRunner, limits: DeviceLimits | None) -> None:
        """limits: what reading keys takes follows from these; None: it counts as nothing."""
        self._runner = runner
        self._keys_s = 0.0 if limits is None else runner.model.cost.kv_bytes * SEQUENCE_TOKENS / limits.bytes_per_s
        self._least: dict[tuple[str, int, int], float] = {}

    def largest(self, num_tokens: int, num_rows: int) -> float:
        """Of a step as large as any that can occur with so many tokens and rows, without keys of earlier ones.

        Raises ConfigError when the memory is too small for it.
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
        """Of a step of so many decodes of ordinary length, each with so many drafts."""
        step_s = self._measure(
            ("decodes", num_rows, num_drafts), lambda: self._runner.profile_decodes(num_rows, num_drafts)
        )
        return step_s + num_rows * self._keys_s  # it runs without keys; no cache holds those of so many

    def _measure(self, shape: tuple[str, int, int], step: Callable[[], None]) -> float:
        least, spent = self._least.get(shape, math.inf), 0.0
        # A GPU's first run may have compiled kernels.
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
