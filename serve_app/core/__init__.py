"""The scheduler: pure Python, standard library only, no clock, no torch, no Ray."""
