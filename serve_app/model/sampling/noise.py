"""Random numbers for sampling: a hash of (seed, choice, position), without a generator or state.

Chained SplitMix64 finalizers (Steele et al., 2014). The sampler decides how the numbers are used.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seeds: Sequence[int], choices: Sequence[int]) -> UInt64Array:
    """Return a hash of each (seed, choice), the input of `at`."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    for part in (seeds, choices):
        state = _chain(state, np.array(part, dtype=np.int64))
    return state


def at(keys: UInt64Array, positions: Int64Array) -> Float64Array:
    """Return one number in [0, 1) per key and position."""
    state = _chain(keys, positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _chain(state: UInt64Array, part: Int64Array) -> UInt64Array:
    z = state + _GOLDEN ^ part.view(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
