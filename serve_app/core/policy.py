"""The knobs of the scheduler. (Queue order, admission gate and preemption victim join them here.)"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of one engine.

    num_blocks counts the null block (block 0); block_size is in tokens and comes from the attention backend.
    vocab_size is the logits' width. The gate's knobs are explained at `AdmissionGate`.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    policy: Literal["fcfs", "priority", "static"] = "fcfs"
    prefill: Literal["fused", "separate"] = "fused"
    waiting_served_ratio: float = 0.0
    max_wait_s: float = 1.0
    max_waiting_steps: int = 20
    enable_prefix_cache: bool = True
