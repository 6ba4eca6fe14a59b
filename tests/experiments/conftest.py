"""The tiny model for every experiment: one thread, float32, where the counts are the same as in any
other dtype."""

from pathlib import Path

import pytest

from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.cli.conftest import tiny_folder

__all__ = ["tiny_folder"]


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_folder))
