"""Which token ends an answer, read from the chat template."""

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.gemma import gemma_file
from tests.text.formats import FAMILIES, tokenizer_of

_TOKENS = [
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "[INST]",
    "[/INST]",
    "<eot>",
]


def with_template(template: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(load_tokenizer("default")._backend.to_str())
    backend.add_special_tokens(_TOKENS)
    backend.add_tokens(["</div>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="<|endoftext|>")
    return Tokenizer(hf, "templated")


def ends(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.end_ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_behind_an_answer_of_a_family(family: str) -> None:
    turn_end = {"gemma4": "<turn|>", "llama3_1": "<|eot_id|>"}.get(family, "<|im_end|>")
    assert ends(tokenizer_of(family)) == list(dict.fromkeys((turn_end, "<|im_end|>")))


_OPENS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _OPENS, ["<|end|>"]),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }} \n<|end|>{% endfor %}" + _OPENS, ["<|end|>"]),
        # The next question's mark ends an answer, as in GLM 4.
        ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + _OPENS, ["<|user|>"]),
        # No two questions in a row, none that is not a question at the end.
        (
            "{% if messages[-1].role != 'user' %}{{ raise_exception('a question must come last') }}{% endif %}"
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
            "{{ m.content }}<eot>{% endif %}{% endfor %}",
            ["<eot>"],
        ),
        # An answer of several messages: what ends one of them is not the answer's end.
        (
            "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
            "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
            [],
        ),
        # Text, not a special token.
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        ("{% for m in messages %}<div>{{ m.content }}</div>{% endfor %}", []),
        ("{% for m in messages %}{{ m.content }} said <|end|>{% endfor %}", []),
        ("{{ raise_exception('nothing is taken') }}", []),
        ("{{ nothing.there.at.all }}", []),
        ("{% for m in messages %}{{ m.content | upper }}<|end|>{% endfor %}", []),
    ],
)
def test_the_token_behind_an_answer_of_a_template(template: str, expected: list[str]) -> None:
    assert ends(with_template(template)) == [*expected, "<|endoftext|>"]


def test_a_base_model_gains_no_end_that_is_text() -> None:
    """Gemma's vocabulary has </s>, which strikes out text in HTML."""
    assert ends(load_tokenizer(str(gemma_file()))) == ["<eos>"]
