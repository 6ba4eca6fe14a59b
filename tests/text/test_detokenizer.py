from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from serve_app.text.detokenizer import Detokenizer
from serve_app.text.token_bytes import TokenBytes
from serve_app.text.tokenizer import Tokenizer
from tests.sentencepiece import sentencepiece_tokenizer

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    decoder = tokenizer.detokenizer(prompt or ())
    return [*(decoder.step(i) for i in ids), decoder.flush()]


@same_fixture
@given(text=st.text(max_size=60))
def test_streamed_pieces_of_any_text_join_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    # not always `text`: vocabularies lack some rare bytes
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or all("\ufffd" not in piece for piece in pieces)


@same_fixture
@given(ids=st.lists(st.integers(3, 300), max_size=30))
def test_streamed_pieces_of_any_ids_join_to_the_whole(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids, skip_special_tokens=True)


def _with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    plain = sentencepiece_tokenizer()
    plain.backend_tokenizer.decoder = decoder
    return Tokenizer(plain, "sentencepiece")


def _wordpiece() -> Tokenizer:
    pieces = ["[UNK]", *"abcd.", "##a", "##b", "##n", "don", "'", "t"]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "wordpiece")


_SPACES = decoders.Replace("\u2581", " ")
VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "as Llama 2": lambda: Tokenizer(sentencepiece_tokenizer(), "sentencepiece"),
    "as Gemma": lambda: _with_decoder(decoders.Sequence([_SPACES, decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": lambda: _with_decoder(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "no decoder": lambda: _with_decoder(None),
    "wordpiece": _wordpiece,
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_any_ids_of_any_vocabulary_have_one_text(kind: str) -> None:
    """In pieces and whole. It is the library's wherever that has whole characters alone."""
    tokenizer = VOCABULARIES[kind]()

    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    def check(ids: list[int]) -> None:
        pieces = stream(tokenizer, ids)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) == whole
        same_start = kind not in ("metaspace", "wordpiece") or ids[:1] == tokenizer.encode("a")
        if same_start and "\ufffd" not in whole:
            assert whole == tokenizer._backend.decode(ids)

    check()


@same_fixture
@given(ids=st.lists(st.integers(0, 49_151), max_size=40))
def test_the_text_of_byte_level_ids_is_the_librarys(byte_level: Tokenizer, ids: list[int]) -> None:
    for skip in (True, False):
        assert byte_level.decode(ids, skip_special_tokens=skip) == byte_level._backend.decode(ids, skip)


def test_a_run_of_bytes_that_turns_out_broken_leaves_the_text_before_it(sentencepiece: Tokenizer) -> None:
    """The library replaces the whole run, also what was shown of it; its own streams raise
    there."""
    ids = [sentencepiece._backend.token_to_id(piece) for piece in ("<0x0A>", "<0xE6>", "a", "<0xE6>", "<0xB0>")]
    assert stream(sentencepiece, ids) == ["\n", "", "\ufffda", "", "", "\ufffd"]


def test_an_unfinished_character_waits_for_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🦄", add_special_tokens=False)
    assert len(ids) > 1
    assert stream(byte_level, ids) == [*[""] * (len(ids) - 1), "🦄", ""]


def test_an_unfinished_character_at_the_end_is_marked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 🦄", add_special_tokens=False)[:-1]
    assert "".join(stream(byte_level, ids)) == "ok \ufffd"


def test_a_continuation_keeps_the_space_before_its_first_word(sentencepiece: Tokenizer) -> None:
    prompt, answer = sentencepiece.encode("hello", add_special_tokens=False), sentencepiece.encode("world")
    assert sentencepiece.token_bytes(answer[0]) == b" world"
    assert "".join(stream(sentencepiece, answer, prompt)) == " world"


def test_garbage_does_not_cost_the_next_word_its_space(sentencepiece: Tokenizer) -> None:
    [word] = sentencepiece.encode("world")
    half = 3 + 0xF0  # three times as many as are held back at most
    assert "".join(stream(sentencepiece, [word, *[half] * 96, word])).endswith("\ufffd world")


def test_a_half_character_at_the_end_of_the_prompt_is_not_repeated(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode("🦄", add_special_tokens=False)[:-1]
    answer = byte_level.encode("abc", add_special_tokens=False)
    assert "".join(stream(byte_level, answer, prompt)) == "abc"


def test_special_tokens_and_unknown_ids_have_no_text(byte_level: Tokenizer) -> None:
    a, b = byte_level.encode("a"), byte_level.encode("b")
    assert "".join(stream(byte_level, [*a, 2, 10**6, *b])) == "ab"


def test_bytes_that_never_become_text_are_not_held_for_ever(byte_level: Tokenizer) -> None:
    lone = byte_level.encode("🦄", add_special_tokens=False)[0]
    decoder: Detokenizer = byte_level.detokenizer()
    shown = [decoder.step(lone) for _ in range(1000)]
    longest_silence = max(len(run) for run in "".join("x" if piece else "." for piece in shown).split("x"))
    assert longest_silence < 40
    assert "".join([*shown, decoder.flush()]) == byte_level.decode([lone] * 1000)


def test_a_decoder_that_joins_tokens_keeps_the_first_space() -> None:
    backend = tokenizers.Tokenizer(models.BPE({" ": 0, "a": 1}, []))
    backend.decoder = decoders.Fuse()
    token_bytes = TokenBytes(backend)
    assert [Detokenizer(token_bytes).step(token_id) for token_id in (0, 1)] == [" ", "a"]
