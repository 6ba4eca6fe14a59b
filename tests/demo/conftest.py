"""The commands' tiny model."""

from tests.cli.conftest import tiny_folder

__all__ = ["tiny_folder"]
