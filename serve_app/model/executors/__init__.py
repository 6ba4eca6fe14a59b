"""The executors: transformers' modules, the C kernels, the Triton kernels. Each decides which
models it accepts.
"""
