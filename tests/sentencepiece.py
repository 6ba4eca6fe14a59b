"""A small tokenizer that writes word starts as "▁", for tests."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, a few words, and one token per byte for everything else (as Llama 2, Gemma and Phi-3
    have it)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["wo", "ld", "rld", "world", "▁world"]
    merges = [("w", "o"), ("l", "d"), ("r", "ld"), ("wo", "rld"), ("▁", "world")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
