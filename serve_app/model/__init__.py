"""Model execution over packed rows and a paged KV pool: loading, attention backends, running,
sampling.
"""
