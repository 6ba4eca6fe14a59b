"""A folder with a random model of a real model's shape: weights, config, tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from load_tests.gpu.steps import random_module

_SHARD = "4GB"
_COMPLETE = "complete"


def random_folder(parent: Path, shape: str, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Path:
    """Write the folder unless it exists, and return its path.

    Every token is a word; token 1 ends a text.
    """
    folder = parent / f"{shape}-{str(dtype).removeprefix('torch.')}"
    if (folder / _COMPLETE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    module = random_module({**config, "bos_token_id": 0, "eos_token_id": 1}, device, dtype)
    module.generation_config.eos_token_id = 1
    module.save_pretrained(folder, max_shard_size=_SHARD)
    _save_tokenizer(folder, config["vocab_size"])
    (folder / _COMPLETE).touch()
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    words = {"<s>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, vocab_size)}}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
