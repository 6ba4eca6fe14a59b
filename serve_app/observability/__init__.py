"""Metrics, logs, traces and timelines of a running engine, made from step records and events.

No other package depends on this one.
"""
