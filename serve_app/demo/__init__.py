"""Demonstrations: what continuous batching buys, and what one packed step looks like. The server needs none of it."""
