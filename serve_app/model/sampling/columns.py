"""Layout of sampling parameters: a float64 matrix with one row per sampled position and one column
per parameter.

Used by the host's batch, the CPU sampler, CUDA graphs and the Triton kernels.
"""

from enum import IntEnum

from serve_app.core.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Smaller temperatures are greedy up to rounding, and dividing by them could overflow."""


class Column(IntEnum):
    """Column indices. NOISE is last: only NOISE changes between the tokens of a request."""

    TEMPERATURE = 0
    """0 means greedy; otherwise at least MIN_TEMPERATURE."""
    TOP_K = 1
    """0 means all tokens."""
    TOP_P = 2
    MIN_P = 3
    NOISE = 4
    """Uniform random number in [0, 1)."""


def request_columns(params: SamplingParams) -> tuple[float, ...]:
    """Return the columns before NOISE, in order. They are constant for a request."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    return temperature, max(params.top_k, 0), params.top_p, params.min_p
