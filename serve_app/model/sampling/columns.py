"""The layout of sampling parameters: a float64 matrix with a row per sampled position and a column per parameter.

The host's batch, the sampler on the CPU, CUDA graphs and the Triton kernels all use this layout.
"""

from enum import IntEnum

from serve_app.core.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Below this a temperature is greedy up to rounding, and dividing by it could overflow."""


class Column(IntEnum):
    """NOISE is the last: it alone changes from token to token."""

    TEMPERATURE = 0
    """0: greedy; else at least MIN_TEMPERATURE."""
    TOP_K = 1
    """0: all tokens."""
    TOP_P = 2
    MIN_P = 3
    NOISE = 4
    """In [0, 1)."""


def request_columns(params: SamplingParams) -> tuple[float, ...]:
    """The columns before NOISE, in order; the same for every token of a request."""
    temperature = 0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    return temperature, max(params.top_k, 0), params.top_p, params.min_p
