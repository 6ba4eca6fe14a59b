"""Which families of transformers run on which path: measured on tiny random models."""
