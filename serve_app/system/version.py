"""The package's version; pyproject.toml and the API read it."""

__version__ = "0.2.0"
