"""What a loaded model takes: memory, and the times of its steps."""
