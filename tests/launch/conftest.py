"""The servers of `tests.serving`."""

from tests.serving.conftest import start

__all__ = ["start"]
