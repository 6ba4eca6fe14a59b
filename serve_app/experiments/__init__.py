"""Experiments on a real model: `compare`, `explain`, and one per idea of continuous batching.

The server does not need them. A module named after a command of `serve-app experiment` has `run`,
`report` (plain data), `show` (a table) and `draw` (a picture).
"""
