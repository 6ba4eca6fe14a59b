"""Attention over the paged KV pool: the protocol, its backends, and their binding to transformers."""
