"""What runs a model's layers: transformers' modules, the C kernels or the Triton kernels. Each says what it takes."""
