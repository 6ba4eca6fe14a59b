"""The HTTP API (OpenAI's wire formats) in FastAPI.

It depends only on a `Service` that generates, not on Ray or the engine.
"""
