"""A model's files: where they are, what their headers say, and what was made of them once. Nothing here needs torch."""
