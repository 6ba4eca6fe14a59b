"""A tiny model in a folder, as users have models: random weights, one token per printable ASCII
character."""

from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from tests.models import tiny_model

CONTEXT = 4096
"""Long enough that a request outlives what tests do to the server meanwhile."""


def write_tiny_model(folder: Path, more_tokens: str = "") -> None:
    """more_tokens: characters beside the printable ones of ASCII."""
    model = tiny_model("llama", torch.float32)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)
    characters = [*map(chr, range(32, 127)), *more_tokens]
    vocabulary = {"<s>": 0, "</s>": 1} | {character: number for number, character in enumerate(characters, start=2)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder
