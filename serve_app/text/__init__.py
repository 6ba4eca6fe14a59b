"""Strings to token ids and back. No torch, no engine, no HTTP."""
