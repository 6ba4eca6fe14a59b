"""The servers of `tests.serving`."""

from tests.cli.conftest import tiny_folder
from tests.serving.conftest import start

__all__ = ["start", "tiny_folder"]
