"""The GPU path: Triton kernels, attention over the paged pool, and the decoder that runs Llama-like models on them."""
