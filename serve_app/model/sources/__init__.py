"""Where a model comes from: configuration and weights of GGUF and safetensors files, what was recognised in them."""
