"""Attention over the paged KV pool: the reference, a CPU backend, verification, and the
transformers hook.
"""
