"""System utilities for all packages: files, HTTP, tasks, CPU priority, the code's digest."""
