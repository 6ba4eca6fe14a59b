"""Fault injection from outside into a real fleet on a local Ray cluster, and its effects on
clients."""
