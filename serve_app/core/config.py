"""The scheduler's configuration: user knobs, and values derived from the model and its memory."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from serve_app.core.autosize import DraftCost
from serve_app.errors import ConfigError

_CHOICES = {
    "policy": ("fcfs", "priority", "static"),
    "prefill": ("fused", "separate"),
    "speculation": ("auto", "off"),
}


_MINIMA = {
    "num_blocks": 2,
    "block_size": 1,
    "max_model_len": 2,
    "vocab_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting_steps": 1,
}


LIVE_KNOBS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill",
    "waiting_served_ratio",
    "max_wait_s",
    "max_waiting_steps",
    "speculation",
)
"""Knobs that may change between two steps. The queue order and the prefix cache may not."""


# Slots and the memory of the largest step are allocated when the engine is built. These knobs may
# be lowered and raised again, but not above their initial values.
_MEASURED = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerKnobs:
    """The scheduler's user knobs. Construction raises ConfigError naming the key.

    - max_num_seqs: sequences that run at once.
    - max_num_batched_tokens: maximum number of tokens in a step.
    - waiting_served_ratio, max_wait_s (seconds), max_waiting_steps: see `AdmissionGate`.
    - policy: fcfs = by arrival; priority = lowest number first, then by arrival; static = by
      arrival, in closed batches (the baseline for continuous batching).
    - prefill: fused = prefill chunks run in the same step as decodes; separate = decodes pause
      while a group is admitted and prefilled, and compute at least one token between two groups.
    - speculation: auto = compute drafts from the request's own text where that saves time.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    policy: Literal["fcfs", "priority", "static"] = "fcfs"
    prefill: Literal["fused", "separate"] = "fused"
    waiting_served_ratio: float = 0.0
    max_wait_s: float = 1.0
    max_waiting_steps: int = 20
    enable_prefix_cache: bool = True
    speculation: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key in _CHOICES and value not in _CHOICES[key]:
                raise ConfigError(f"{key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
            if key in _MINIMA and (type(value) is not int or value < _MINIMA[key]):
                raise ConfigError(f"{key} must be an integer of at least {_MINIMA[key]}, got {value!r}")
            if field.type is float and not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{key} must be a finite number of at least 0, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request computes a token in every step"
            )

    def knobs(self) -> dict[str, Any]:
        """Return the knobs alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulerKnobs)}

    def check_change(self, knobs: "SchedulerKnobs") -> None:
        """Raise `ConfigError` unless an engine built with `self` can switch to `knobs`."""
        changed = {key: value for key, value in knobs.knobs().items() if value != getattr(self, key)}
        for key, value in changed.items():
            if key not in LIVE_KNOBS:
                raise ConfigError(f"{key} cannot change in a running engine (live: {', '.join(LIVE_KNOBS)})")
            if key in _MEASURED and value > getattr(self, key):
                raise ConfigError(
                    f"{key} must be at most {getattr(self, key)} in this running engine, whose memory was sized for "
                    f"it, got {value}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerKnobs):
    """The knobs, and values derived from the model and its memory.

    Raises ConfigError naming the key. num_blocks includes the null block (block 0). block_size is
    in tokens and comes from the attention backend. vocab_size is the logits' width. draft_cost: the
    cost of drafts on this machine.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    draft_cost: DraftCost = DraftCost()

    def __post_init__(self) -> None:
        SchedulerKnobs.__post_init__(self)  # not super(): `slots` creates a new class
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"eos_token_ids contains {token_id}; the model has ids 0 to {self.vocab_size - 1}")
