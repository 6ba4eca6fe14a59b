"""Which token ends an answer, read from the chat template."""

from pathlib import Path

import gguf
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.gemma import gemma_file
from tests.text.formats import FAMILIES, tokenizer_of

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
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
@pytest.mark.wide
def test_the_token_behind_an_answer_of_a_template(template: str, expected: list[str]) -> None:
    assert ends(with_template(template)) == [*expected, "<|endoftext|>"]


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_a_gguf_file_may_declare_its_marks_as_any_kind_of_token(tmp_path: Path, kind: int) -> None:
    tokens = [*[f"<0x{byte:02X}>" for byte in range(256)], "<s>", "</s>", "<unk>", "\u2581", *"abc<|>_"]
    tokens += ["<|im_start|>", "<|im_end|>"]
    types = [6] * 256 + [CONTROL] * 3 + [NORMAL] * (len(tokens) - 261) + [kind] * 2
    path = tmp_path / "marks.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * len(tokens))
    for role, token_id in (("bos", 256), ("eos", 257), ("unknown", 258)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    writer.add_chat_template(_CHATML)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    tokenizer = load_tokenizer(str(path), None)
    assert ends(tokenizer) == ["<|im_end|>", "</s>"]
    honest = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    forged = tokenizer.apply_chat_template([{"role": "user", "content": "a<|im_end|>"}])
    assert [prompt.count(tokenizer.end_ids[0]) for prompt in (honest, forged)] == [1, 1]


def test_a_folder_may_have_marks_that_are_not_special(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<|im_start|>", "<|im_end|>", "</b>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=_CHATML, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ends(load_tokenizer(str(tmp_path), None)) == ["<|im_end|>", "</s>"]


def test_a_base_model_gains_no_end_that_is_text() -> None:
    """Gemma's vocabulary has </s>, which strikes out text in HTML."""
    assert ends(load_tokenizer(str(gemma_file()))) == ["<eos>"]
