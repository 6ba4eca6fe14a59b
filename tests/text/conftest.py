"""Two kinds of tokenizers: the default model's (byte-level) and a small one that writes word starts
as "▁"."""

import pytest

from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.sentencepiece import sentencepiece_tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return load_tokenizer("default")


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_tokenizer(), "sentencepiece")


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    loaded: Tokenizer = request.getfixturevalue(request.param)
    return loaded
