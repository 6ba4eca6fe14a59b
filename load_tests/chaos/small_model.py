"""A small random model that loads quickly and is slow enough for faults during streams.

Its tokens are the printable ASCII characters, so lost and repeated tokens show as characters.
"""

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 4096
_CHARACTERS = [chr(code) for code in range(32, 127)]


def write_small_model(folder: Path, seed: int = 0, *, reverse: bool = False) -> None:
    """Write weights, config and tokenizer to `folder`. reverse: reverse the token ids."""
    characters = _CHARACTERS[::-1] if reverse else _CHARACTERS
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *characters])}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Wider than the usual initialization: with nearly equal logits all texts would look alike.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
