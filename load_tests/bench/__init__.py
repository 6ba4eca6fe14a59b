"""Benchmarks: our server and its peers under the same requests, and single parts of it."""
