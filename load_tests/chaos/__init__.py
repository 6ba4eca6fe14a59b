"""Faults injected from outside into a real fleet on a local Ray cluster, and what its clients
notice of them."""
