"""The random numbers of sampling: a hash of (seed, choice, position), so there is neither a generator nor a state.

Chained SplitMix64 finalizers (Steele et al., 2014). How they are used, the sampler decides.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(seeds: Sequence[int], choices: Sequence[int]) -> UInt64Array:
    """The hash of each (seed, choice), which `at` continues."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    for part in (seeds, choices):
        state = _chain(state, np.array(part, dtype=np.int64))
    return state


def at(keys: UInt64Array, positions: Int64Array) -> Float64Array:
    """One number in [0, 1) for each key and position."""
    state = _chain(keys, positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _chain(state: UInt64Array, part: Int64Array) -> UInt64Array:
    z = state + _GOLDEN ^ part.view(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
