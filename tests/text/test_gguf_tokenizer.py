"""The tokenizers of GGUF files: their ids are llama.cpp's, and what cannot be honoured is refused
by name."""

import gzip
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests.llama_cpp_ids import checksum
from load_tests.llama_cpp_ids.headers import write_header, write_sentencepiece
from serve_app.checkpoints.gguf_header import GgufHeader
from serve_app.checkpoints.model_files import locate_model
from serve_app.errors import ConfigError
from serve_app.model.sources.refused_keys import check_refused
from serve_app.text.gguf_tokenizer import _Keys, _merging, _Vocabulary
from serve_app.text.pre_tokenizers import PRE_TOKENIZERS
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.examples import examples
from tests.gemma import gemma_file

pytestmark = pytest.mark.wide

IDS = Path(__file__).with_name("llama_cpp_ids.json.gz")
DEFAULT = locate_model("default").path
CONTROL, USER_DEFINED = 3, 4


@cache
def truth() -> dict[str, Any]:
    """What llama.cpp makes of the lines; `load_tests.llama_cpp_ids` says how it was written."""
    found: dict[str, Any] = json.loads(gzip.decompress(IDS.read_bytes()))
    return found


@cache
def tokenizer_of(model: str) -> Tokenizer:
    """Of the default model, or of Gemma."""
    return load_tokenizer("default" if model == "default" else str(gemma_file()))


DEPARTURES = {
    "kimi-k2": "[a-z][A-Z]",
    "youtu": "[a-z][A-Z]",
    "tiny_aya": r"[a-z][A-Z]|\d",
    "cohere2moe": r"[a-z][A-Z]|\d",
    "afmoe": r"\d",
}
"""Lines in which llama.cpp does not do what the model's own patterns say: it joins words that
change from small letters to capitals, and leaves white space together with the digits behind it."""


def differing(token_ids: Iterable[list[int]], checksums: list[int]) -> list[str]:
    """The lines whose ids are others."""
    return [line for line, ids, one in zip(truth()["lines"], token_ids, checksums, strict=True) if checksum(ids) != one]


def changed(folder: Path, **changes: Any) -> Path:
    """A file with the default model's tokenizer but for these keys under `tokenizer.ggml.`."""
    assert DEFAULT is not None
    return write_header(folder / "file.gguf", DEFAULT, {f"tokenizer.ggml.{name}": changes[name] for name in changes})


def load(folder: Path, **changes: Any) -> Tokenizer:
    return load_tokenizer(str(changed(folder, **changes)), None)


@cache
def default_vocabulary() -> tuple[_Vocabulary, list[str]]:
    """Tokens and merges."""
    assert DEFAULT is not None
    keys = _Keys(GgufHeader(DEFAULT).fields)
    return _Vocabulary.read(keys), keys.texts("ggml.merges")


def with_tokens(types: dict[str, int]) -> dict[str, list[Any]]:
    """The default model's tokens, the last ones replaced."""
    vocabulary, merges = default_vocabulary()
    count = len(vocabulary.tokens) - len(types)
    tokens = [*vocabulary.tokens[:count], *types]
    known = set(tokens)
    kept = [merge for merge in merges if merge.replace(" ", "") in known]
    return {"tokens": tokens, "token_type": [*vocabulary.types[:count], *types.values()], "merges": kept}


@pytest.mark.parametrize("model", ["default", "gemma"])
def test_a_thousand_lines_have_llama_cpp_s_ids(model: str) -> None:
    tokenizer = tokenizer_of(model)
    lines = truth()["lines"]
    assert len(lines) == 1000
    different = [line for line, ids in zip(lines, truth()[model], strict=True) if tokenizer.encode(line) != ids]
    assert different == []
    in_chunks = [tokenizer.encode(line, scope="all") for line in lines]
    assert in_chunks == truth()[model]


def test_a_numbered_list_and_a_run_of_spaces() -> None:
    """Digits are split off before everything else; Gemma's runs of up to 31 spaces are tokens that
    nothing merges."""
    default, gemma = map(tokenizer_of, ("default", "gemma"))
    assert [default.token_bytes(i) for i in default.encode("\n\n1.")] == [b"\n\n", b"1", b"."]
    spaces = [gemma.token_bytes(i) for i in gemma.encode(" " * 33, add_special_tokens=False)]
    assert list(map(len, spaces)) == [31, 2]


@pytest.mark.parametrize(("names", "expected"), truth()["pre"], ids=[names[0] for names, _ in truth()["pre"]])
def test_each_pre_tokenizer_splits_as_llama_cpp_does(names: list[str], expected: list[int]) -> None:
    """With the default model's tokens and merges. Names that llama.cpp splits alike are split alike
    here."""
    vocabulary, merges = default_vocabulary()
    for pre in {PRE_TOKENIZERS[name] for name in names}:
        backend = _merging(vocabulary, merges, pre)
        backend.add_tokens([*vocabulary.added_tokens(rstrip=lambda token: False)])
        encodings = backend.encode_batch(truth()["lines"], add_special_tokens=False)
        different = differing((encoding.ids for encoding in encodings), expected)
        departs = next((DEPARTURES[name] for name in names if PRE_TOKENIZERS[name] == pre and name in DEPARTURES), None)
        assert [line for line in different if departs is None or not re.search(departs, line)] == []
        assert (different == []) is (departs is None)


def test_the_table_has_all_names_that_were_compared() -> None:
    compared = {name for names, _ in truth()["pre"] for name in names}
    assert compared == {name for name, pre in PRE_TOKENIZERS.items() if pre.byte_level}


@pytest.mark.parametrize("space_in_front", [False, True])
def test_a_sentencepiece_vocabulary_is_merged_by_its_scores(tmp_path: Path, space_in_front: bool) -> None:
    path = write_sentencepiece(tmp_path / "file.gguf", truth()["lines"], space_in_front=space_in_front)
    name = "sentencepiece with a space in front" if space_in_front else "sentencepiece"
    assert differing(map(load_tokenizer(str(path), None).encode, truth()["lines"]), truth()[name]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "made-up"}, "tokenizer.ggml.pre is 'made-up'"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"made_up": 1}, "tokenizer.ggml.made_up is not supported"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces requests merging spaces"),
        ({"normalizer.lowercase": True}, "normalizer.lowercase"),
        ({"suppress_tokens": [5]}, "suppress_tokens"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 49152 tokens"),
        ({"eot_token_id": 49152}, "eot_token_id is 49152; there are 49152 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but bos_token_id is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": None, "merges": []}, "has 'a' more than once"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    assert said in str(caught.value)


def test_what_changes_nothing_is_served(tmp_path: Path) -> None:
    harmless = {"token_type_count": 1, "mask_token_id": 5, "add_sep_token": True, "fim_pre_token_id": 6}
    off = {"remove_extra_whitespaces": False, "normalizer.lowercase": False}
    tokenizer, plain = load(tmp_path, **harmless, **off), load_tokenizer("default")
    assert tokenizer.encode("Ship 12, ahoy!") == plain.encode("Ship 12, ahoy!")
    assert tokenizer.digest == plain.digest


def test_keys_that_the_operator_ignores_are_skipped(tmp_path: Path) -> None:
    path, ignored = changed(tmp_path, made_up=1), ["tokenizer.ggml.made_up"]
    tokenizer = load_tokenizer(str(path), tmp_path / "cache", ignored=ignored)
    assert tokenizer.digest == load_tokenizer("default").digest
    with pytest.raises(ConfigError, match="made_up.*ignore_model_keys"):  # also with what is kept
        load_tokenizer(str(path), tmp_path / "cache")
    check_refused(path, {}, ignored)  # the model's other files have no say in the tokenizer's keys


def test_begin_and_end_tokens_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    plain = load_tokenizer("default").encode("Hello")
    assert load(tmp_path, add_bos_token=True).encode("Hello") == [1, *plain]
    assert load(tmp_path, add_eos_token=True).encode("Hello") == [*plain, 2]
    assert load(tmp_path, add_bos_token=True).encode("Hello", add_special_tokens=False) == plain
    # Llama 3's files say it by the name alone.
    assert load(tmp_path, pre="llama-bpe", add_bos_token=None).encode("Hello")[0] == 1


def test_user_defined_tokens_are_matched_before_anything_is_merged(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, **with_tokens({"loWo": USER_DEFINED, "<note>": CONTROL}))
    ids = tokenizer.encode("HelloWorld<note>")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"Hel", b"loWo", b"r", b"ld", b"<note>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "HelloWorld"


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = load_tokenizer(str(changed(tmp_path)), cache)
    second = load_tokenizer(str(changed(tmp_path, pre="gpt-2")), cache)
    assert first.encode("\n\n1.") != second.encode("\n\n1.")
    assert first.digest != second.digest


@settings(max_examples=examples(200))
@given(text=st.text(max_size=80))
def test_any_text_comes_back(text: str) -> None:
    """But for bytes that the default model's vocabulary lacks, and for the mark that stands for a
    space in Gemma's."""
    default, gemma = map(tokenizer_of, ("default", "gemma"))
    ids = default.encode(text)
    assert b"".join(map(default.token_bytes, ids)).decode(errors="replace") == default.decode(ids)
    ids = gemma.encode(text, add_special_tokens=False)
    assert gemma.decode(ids) == text.replace("\u2581", " ")
