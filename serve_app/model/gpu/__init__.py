"""The GPU path: Triton kernels, attention over the paged pool, and the decoder for Llama-like
models.
"""
