"""Tokenizers with the chat templates of six families of models, for tests of tools and
reasoning."""

from functools import cache
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
FAMILIES = ("hermes", "qwen2_5", "qwen3", "qwen3_5_think", "gemma4", "llama3_1", "ministral3")
_SPECIAL = {
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>"],
    "ministral3": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"],
    "llama3_1": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
}
_ADDED = {"qwen3": ["<tool_call>", "</tool_call>", "<think>", "</think>"]}
IN_VARIABLES = "qwen3 with its control tokens in variables"
_ADDED[IN_VARIABLES] = _ADDED["qwen3"]


def _template(family: str) -> str:
    if family != IN_VARIABLES:
        return (TEMPLATES / f"{family}.jinja").read_text()
    usual = _template("qwen3").replace("'<|im_start|>' + message.role", "turn.start ~ message.role")
    return "{%- set turn = {'start': '<|im_start|>'} %}{%- set end = '<|im_end|>' %}" + usual.replace(
        "'<|im_end|>'", "end"
    )


@cache
def tokenizer_of(family: str) -> Tokenizer:
    """The default model's vocabulary with the family's template and markers, special or not as the
    family has them."""
    default = load_tokenizer("default", tools="hermes")
    if family == "hermes":
        return default
    backend = tokenizers.Tokenizer.from_str(default._backend.to_str())
    backend.add_special_tokens(_SPECIAL.get(family, []))
    backend.add_tokens(_ADDED.get(family, []))
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_template(family), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    return Tokenizer(hf, family)
