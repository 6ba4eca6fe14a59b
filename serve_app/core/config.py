"""The scheduler's configuration: what users may turn, and what the model and its memory set."""

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
"""What may change between two steps. The order of a queue and what the prefix cache knows may not."""


# Slots and the memory of the largest step are allocated when an engine is built: these may be lowered and raised
# again, but not beyond their first values.
_MEASURED = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerKnobs:
    """What users may turn. Construction raises ConfigError naming the key.

    max_num_seqs: sequences that run at once. max_num_batched_tokens bounds the tokens of one step. The gate's knobs
    (waiting_served_ratio, max_wait_s in seconds, max_waiting_steps) are explained at `AdmissionGate`.

    policy: fcfs = by arrival; priority = lower number first, then by arrival; static = by arrival, in closed batches,
    the baseline that continuous batching is compared with. prefill: fused = prefill chunks ride in the packed step;
    separate = while a group is admitted and prefilled, decodes pause; between two groups they compute a token at least.
    speculation: auto = tokens that a request's own text suggests are computed ahead where that saves time.
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
        """The knobs alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulerKnobs)}

    def check_change(self, knobs: "SchedulerKnobs") -> None:
        """Raise `ConfigError` unless an engine that was built with `self` can go on with `knobs`."""
        changed = {key: value for key, value in knobs.knobs().items() if value != getattr(self, key)}
        for key, value in changed.items():
            if key not in LIVE_KNOBS:
                raise ConfigError(f"{key} cannot change in a running engine (live: {', '.join(LIVE_KNOBS)})")
            if key in _MEASURED and value > getattr(self, key):
                raise ConfigError(
                    f"{key} can be at most {getattr(self, key)} in this running engine, whose memory was measured "
                    f"with it, got {value}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerKnobs):
    """The knobs, and what the model and its memory set. Construction raises ConfigError naming the key.

    num_blocks counts the null block (block 0); block_size is in tokens and comes from the attention backend.
    vocab_size is the logits' width. draft_cost: what drafts cost on this machine.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    draft_cost: DraftCost = DraftCost()

    def __post_init__(self) -> None:
        SchedulerKnobs.__post_init__(self)  # not super(): `slots` makes a new class, which super() would not know
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"eos_token_ids holds {token_id}; the logits have ids 0 to {self.vocab_size - 1}")
