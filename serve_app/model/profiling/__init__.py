"""Measures a loaded model: its memory and its step times."""
