"""The minimum bytes and operations of a step, from its rows.

Divided by the step's time, they give the device utilization. Decides how rows are counted. The
model provides its sizes and the device's limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.step_plan import ScheduledRequest


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's contribution to the cost of a step.

    Sliding windows and unused experts are counted as if fully used.

    - weight_bytes: bytes of weights that each step reads.
    - kv_bytes: keys and values of one token, all layers.
    - layer_weights: weights that each token is multiplied with.
    - head_weights: additional weights for each sampled token.
    - pair_flops: operations of attention for one query and one key, all layers.
    """

    weight_bytes: int
    kv_bytes: int
    layer_weights: int
    head_weights: int
    pair_flops: int

    def of(self, rows: Iterable[ScheduledRequest]) -> tuple[int, int]:
        """Return a step's bytes read and operations (multiplications plus additions)."""
        keys = tokens = sampled = pairs = 0
        for row in rows:
            count, end = row.num_tokens, row.start + row.num_tokens
            keys += end
            tokens += count
            pairs += count * (row.start + end + 1) // 2
            if row.samples:
                sampled += len(row.draft_token_ids) + 1
        num_bytes = self.weight_bytes + self.kv_bytes * keys
        num_flops = 2 * (self.layer_weights * tokens + self.head_weights * sampled) + self.pair_flops * pairs
        return num_bytes, num_flops


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Measured limits of a device.

    bytes_per_s: read and written by a copy. flops_per_s: of a large product in the model's dtype
    (kernels with fewer bits can exceed it).
    """

    bytes_per_s: float
    flops_per_s: float
