"""Checks of every request before its route: keys, origins, sizes, timeouts.

Also error responses.
"""
