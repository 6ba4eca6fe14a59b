"""What continuous batching buys, on a real model: `compare`, `explain`, and an experiment for each of its ideas.

The server needs none of it. A module whose name is a command of `serve-app experiment` offers `run`, `report` (plain
data), `show` (a table) and `draw` (a picture).
"""
