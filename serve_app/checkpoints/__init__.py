"""A model's files: location, headers, and cached conversions. Does not need torch."""
