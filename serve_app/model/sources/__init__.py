"""Model sources: configuration and weights of GGUF and safetensors files, and cached blueprints."""
