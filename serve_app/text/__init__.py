"""Converts text to token ids and back. Independent of torch, the engine and HTTP."""
