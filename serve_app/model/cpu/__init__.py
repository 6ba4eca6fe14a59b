"""CPU kernels in C: weights packed for vector registers, paged attention, one call per step."""
