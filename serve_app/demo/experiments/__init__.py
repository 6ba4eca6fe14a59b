"""The experiments that made continuous batching known, on a real model: one module each, one command each."""
