"""The engine: scheduler and model in one step loop.

For libraries: `LLM`; for servers: `AsyncEngine`.
"""
