"""A text whose beginning is remembered has the ids that the tokenizer itself gives it, whatever its
pattern for words.

The vocabulary is the real one; the patterns are those of GPT-2, of Llama 3 and Qwen, of GPT-4o and
of DeepSeek V3.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers, processors

from serve_app.text import prefix_encoder
from serve_app.text.prefix_encoder import PrefixEncoder
from serve_app.text.tokenizer import load_tokenizer
from tests.examples import examples

PATTERNS = {
    "gpt2": None,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "space last": r"\p{L}+ ?|[^\p{L}]",
    "words of several": r"\p{L}+ \p{L}+|\s?\p{L}+|[^\p{L}]",
    "none": "",
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXT_PARTS = [
    *("a", "the", " word", " another one", " Straße", " слово", " é", "e\u0301", " 世界", "😀", "'s", "'Re", "DON'T"),
    *(
        " ",
        "  ",
        "\n",
        " \n",
        "\n\n ",
        "\t",
        "\u00a0",
        "\u3000",
        " 12345",
        "3.14",
        "_x",
        '{"a": "b c"}',
        "def f(x):\n    y",
    ),
    *("<|im_end|>", "<|im_start|>", " <|im_end|> ", "<two words>", "a long name of one token", "a long name of one"),
]


@cache
def backend(pattern: str) -> tokenizers.Tokenizer:
    """The real model's tokenizer, with other patterns of words and with added tokens that hold
    letters and spaces."""
    made = tokenizers.Tokenizer.from_str(load_tokenizer("default")._backend.to_str())
    regex = PATTERNS[pattern]
    if regex is not None:
        pieces = [BYTES]
        if regex:
            pieces.insert(0, pre_tokenizers.Split(Regex(regex), "isolated"))
        made.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    stripping = AddedToken("<two words>", lstrip=True, rstrip=True)
    made.add_tokens(["a long name of one token", stripping])
    return made


texts = st.lists(st.sampled_from(TEXT_PARTS) | st.text(max_size=8), max_size=60).map("".join)


@settings(max_examples=examples(300))
@given(
    pattern=st.sampled_from([*PATTERNS]),
    start=texts,
    ends=st.lists(texts, min_size=2, max_size=5),
    special=st.booleans(),
    size=st.sampled_from([30, 60, 130, 16_384]),
)
def test_ids_are_the_tokenizers_own(pattern: str, start: str, ends: list[str], special: bool, size: int) -> None:
    whole = backend(pattern)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_encoder, "_CHUNK", 40)
        patch.setattr(prefix_encoder, "_SLICE", size)
        encoder = PrefixEncoder(whole)
        for end in [*ends, *ends]:
            text = start + end
            assert (
                encoder.encode(text, add_special_tokens=special, scope="")
                == whole.encode(text, add_special_tokens=special).ids
            ), json.dumps(text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_follows_a_chunk_may_change_the_tokens_at_its_end(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_encoder, "_CHUNK", 60)
    whole = backend(pattern)
    for length in range(90):
        encoder = PrefixEncoder(whole)
        for end in ("a long name of one tortoise", "a long name of one token", "a long name of one tortoise"):
            text = ("word by word " * 8)[-length:] + end + " and more" * 9
            assert encoder.encode(text, add_special_tokens=True, scope="") == whole.encode(text).ids


CONTEXTUAL: dict[str, tuple[pre_tokenizers.PreTokenizer, list[AddedToken]]] = {
    "adds a space": (pre_tokenizers.ByteLevel(add_prefix_space=True), [AddedToken("<x>", rstrip=True)]),
    "a single word with a space": (GPT2, [AddedToken(" leading space", single_word=True, normalized=False)]),
    "a single word of several": (GPT2, [AddedToken("leading space", single_word=True), AddedToken("space")]),
    "two that overlap": (
        GPT2,
        [
            AddedToken("I am the leading space and<", normalized=True),
            AddedToken("<|a special token|>", normalized=False),
        ],
    ),
    "looks behind": (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(?<![a-z]) ?[a-z]|\w+"), "isolated"), BYTES]),
        [],
    ),
    "words end in a space": (pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "merged_with_previous"), BYTES]), []),
    "by scripts": (pre_tokenizers.Sequence([pre_tokenizers.UnicodeScripts(), BYTES]), []),
}


@pytest.mark.parametrize("name", CONTEXTUAL)
def test_what_stands_before_a_cut_never_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_encoder, "_CHUNK", 60)
    whole = tokenizers.Tokenizer.from_str(load_tokenizer("default")._backend.to_str())
    whole.pre_tokenizer, added = CONTEXTUAL[name]
    whole.post_processor = processors.ByteLevel(trim_offsets=True)
    whole.add_tokens(added)
    for length in range(90):
        encoder = PrefixEncoder(whole)
        for end in ("|a special token|>", "|a special token|!", "|a special token|>"):
            start = ("word by word " * 8)[-length:] + "x<x> I bar<|im_end|>a bar, xleading space"
            text = f"{start} I am the leading space and<{end}" + " and more" * 9
            assert encoder.encode(text, add_special_tokens=True, scope="") == whole.encode(text).ids


def test_what_is_kept_of_a_text_without_cuts_is_bounded() -> None:
    encoder = PrefixEncoder(backend("gpt2"))
    for number in range(50):
        text = "1" * 256 * 20 + f"{number:06d} a b " + "." * 300
        assert encoder.encode(text, add_special_tokens=False, scope="") == backend("gpt2").encode(text).ids
    assert sum(len(chunk.ids) for chunk in encoder._chunks.values()) < 512


class Watched:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.encoded: list[str] = []
        self.encode_batch: Callable[..., list[tokenizers.Encoding]] = self._encode_batch

    def _encode_batch(self, texts: list[str], **how: bool) -> list[tokenizers.Encoding]:
        self.encoded += texts
        return self._inner.encode_batch(texts, **how)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def watched(pattern: str = "gpt2") -> tuple[PrefixEncoder, list[str]]:
    inner = Watched(backend(pattern))
    encoder = PrefixEncoder(inner)
    inner.encoded.clear()
    return encoder, inner.encoded


HISTORY = "<|im_start|>user\nTell me of the sea and of the ships that go there.<|im_end|>\n" * 40


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "gpt4o", "deepseek"])
def test_of_a_next_turn_only_the_new_part_is_encoded(pattern: str) -> None:
    encoder, encoded = watched(pattern)
    for turn in range(4):
        text = HISTORY + "What about the harbour? " * turn
        assert encoder.encode(text, add_special_tokens=False, scope="") == backend(pattern).encode(text).ids
    assert encoded[0] == HISTORY
    assert all(len(text) < 2 * 256 + 24 * 3 for text in encoded[1:])


def test_a_long_text_is_encoded_in_slices() -> None:
    """Of which each begins at the last cut of the one before."""
    text = HISTORY * 20
    for pattern in ("gpt2", "llama3"):
        encoder, encoded = watched(pattern)
        assert encoder.encode(text, add_special_tokens=True, scope="") == backend(pattern).encode(text).ids
        assert max(map(len, encoded)) == 16_384
        assert sum(map(len, encoded)) < len(text) + 300 * len(encoded)
    without_cuts = "1234567890" * 4000
    encoder, encoded = watched()
    for _ in range(2):
        assert (
            encoder.encode(without_cuts, add_special_tokens=True, scope="") == backend("gpt2").encode(without_cuts).ids
        )
        assert sum(map(len, encoded)) <= len(without_cuts) + 16_384
        encoded.clear()


@pytest.mark.parametrize("pattern", ["none", "space last"])
def test_nothing_is_remembered_where_texts_are_cut_otherwise(pattern: str) -> None:
    encoder, encoded = watched(pattern)
    text = "only words of letters " * 40
    for _ in range(3):
        encoder.encode(text, add_special_tokens=False, scope="")
    assert encoded == [text] * 3


def test_what_another_scope_remembers_is_not_found() -> None:
    encoder, encoded = watched()
    for scope, special in [("a", True), ("b", True), ("a", False), ("a", True)]:
        encoder.encode(HISTORY, add_special_tokens=special, scope=scope)
    assert [text == HISTORY for text in encoded] == [True, True, True, False]


def test_special_tokens_at_both_ends_are_kept() -> None:
    both = tokenizers.Tokenizer.from_str(backend("gpt2").to_str())
    ends = [(name, both.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    both.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ends)
    first = tokenizers.Tokenizer.from_str(backend("gpt2").to_str())
    first.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=ends[:1])
    for whole in (both, first):
        encoder = PrefixEncoder(whole)
        for _ in range(2):
            for special in (True, False):
                ids = whole.encode(HISTORY, add_special_tokens=special).ids
                assert encoder.encode(HISTORY, add_special_tokens=special, scope="") == ids


def test_the_memory_is_bounded_and_forgets_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_encoder, "_MAX_CHUNKS", 20)
    encoder, encoded = watched()
    draw = Random(0)
    other = " ".join("".join(draw.choices("abcdefgh", k=6)) for _ in range(500))
    assert len(HISTORY) < 20 * 256 < len(HISTORY) + len(other)
    for text in (HISTORY, other, HISTORY):
        encoder.encode(text, add_special_tokens=False, scope="")
        assert len(encoder._chunks) <= 20
    assert len(HISTORY) - len(encoded[-1]) > 256, "its beginning was still known"


def test_threads_may_share_it() -> None:
    encoder, whole = PrefixEncoder(backend("gpt2")), backend("gpt2")
    made = [HISTORY[: 300 * (i % 7)] + f" and number {i % 5} of them all " * (i % 11) for i in range(400)]

    def encode(text: str) -> list[int]:
        return encoder.encode(text, add_special_tokens=True, scope="")

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(encode, made)] == [whole.encode(text).ids for text in made]
