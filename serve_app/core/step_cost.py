"""The minimum bytes and operations of a step, from its rows. Divided by its time, they give the device utilization.

Decides how rows are counted. The model provides its sizes and the device's limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.step_plan import ScheduledRequest


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's share in the cost of a step; sliding windows and the experts that are not asked are counted as if used.

    weight_bytes: bytes of weights that each step reads. kv_bytes: of one token's keys and values, all layers.
    layer_weights: numbers that each token is multiplied with; head_weights: that each sampled one is as well.
    pair_flops: operations of attention for one query and one key, all layers.
    """

    weight_bytes: int
    kv_bytes: int
    layer_weights: int
    head_weights: int
    pair_flops: int

    def of(self, rows: Iterable[ScheduledRequest]) -> tuple[int, int]:
        """Bytes read, and multiplications and additions done, by a step of these rows."""
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
    """Measured limits of a device: bytes per second read and written by a copy, operations per second of a large
    product in the model's dtype (kernels with fewer bits can exceed it)."""

    bytes_per_s: float
    flops_per_s: float
