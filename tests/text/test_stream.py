from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.core.results import LOGPROBS, FinishReason, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.text.stream import StopConfig, TextStream
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_format import Thinking
from tests.text.formats import tokenizer_of

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
EOS = 2


def delta(
    ids: Sequence[int], offset: int = 0, reason: FinishReason | None = None, logprobs: bool = False
) -> TokenDelta:
    entries = tuple(TokenLogprob(i, -float(i % 7), ((i, -0.5),)) for i in ids) if logprobs else ()
    return TokenDelta("r", 0, offset, tuple(ids), finish_reason=reason, results={LOGPROBS: entries})


def run(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], stop: StopConfig | None = None) -> tuple[str, TextStream]:
    stream = TextStream(tokenizer, (), stop or StopConfig())
    return "".join(stream.feed(d).text for d in deltas), stream


def in_parts(ids: list[int], sizes: list[int], reason: FinishReason, logprobs: bool = False) -> list[TokenDelta]:
    """The same tokens, so many per delta; the last delta ends the choice."""
    deltas, at = [], 0
    while at < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        end = min(at + size, len(ids))
        deltas.append(delta(ids[at:end], at, reason if end == len(ids) else None, logprobs))
        at = end
    return deltas


@same_fixture
@given(
    text=st.text(alphabet="ab 🦄\n", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab 🦄", min_size=1, max_size=4), max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_text_logprobs_and_end_do_not_depend_on_how_tokens_arrive(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    stop = StopConfig(tuple(stops), include)

    def outcome(sizes: list[int]) -> tuple[str, list[object], int, object]:
        stream = TextStream(byte_level, (), stop)
        pieces = [stream.feed(d) for d in in_parts(ids, sizes, FinishReason.LENGTH, logprobs=True)]
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return "".join(p.text for p in pieces), list(entries), stream.num_tokens, stream.finish_reason

    whole = outcome([len(ids)])
    assert outcome(sizes) == whole
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        assert whole[3] is FinishReason.STOP
        assert text[: min(ends)].startswith(whole[0])
    else:
        assert whole[0] == text
        assert whole[2:] == (len(ids), FinishReason.LENGTH)


def test_the_end_token_counts_but_is_neither_text_nor_logprob(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hi")
    stream = TextStream(byte_level, (), StopConfig())
    piece = stream.feed(delta([*ids, EOS], 0, FinishReason.STOP, logprobs=True))
    assert piece.text == "Hi"
    assert [entry.data for entry in piece.logprobs] == [byte_level.token_bytes(i) for i in ids]
    assert stream.num_tokens == len(ids) + 1
    assert piece.finish_reason is FinishReason.STOP


def test_a_visible_stop_token_is_shown_only_on_demand(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b")
    hidden, _ = run(byte_level, [delta(ids, 0, FinishReason.STOP)])
    shown, _ = run(byte_level, [delta(ids, 0, FinishReason.STOP)], StopConfig(include=True))
    assert (hidden, shown) == ("a", "a b")


def test_repeated_tokens_are_ignored(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two three four five")
    again = [delta(ids[:3]), delta(ids[1:4], 1), delta(ids[:2]), delta(ids, 0, FinishReason.LENGTH)]
    text, stream = run(byte_level, again)
    assert text == "one two three four five"
    assert stream.num_tokens == len(ids)


def test_missing_tokens_are_an_error(byte_level: Tokenizer) -> None:
    with pytest.raises(EngineError, match="lost"):
        run(byte_level, [delta([20, 21]), delta([22], 3)])


def test_an_engine_error_carries_its_message(byte_level: Tokenizer) -> None:
    with pytest.raises(EngineError, match="boom"):
        run(byte_level, [TokenDelta("r", 0, 0, (), finish_reason=FinishReason.ERROR, error=EngineError("boom"))])


def test_held_back_text_appears_when_the_end_comes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("wait for it", add_special_tokens=False)
    stream = TextStream(byte_level, (), StopConfig(("for it all",)))
    assert stream.feed(delta(ids)).text == "wait "
    assert stream.feed(delta([], len(ids), FinishReason.LENGTH)).text == "for it"


@pytest.mark.parametrize("text", ["你好世界", "สวัสดี", "ok 🦄"])
def test_an_answer_that_is_cut_ends_before_a_half_character(byte_level: Tokenizer, text: str) -> None:
    """In pieces and whole alike; its token is among the log-probabilities all the same."""
    ids = byte_level.encode(text, add_special_tokens=False)[:-1]
    for sizes in ([1], [len(ids)]):
        stream = TextStream(byte_level, (), StopConfig())
        pieces = [stream.feed(d) for d in in_parts(ids, sizes, FinishReason.LENGTH, logprobs=True)]
        assert "".join(piece.text for piece in pieces) == text[:-1]
        assert sum(len(piece.logprobs) for piece in pieces) == len(ids)


def test_a_model_that_ends_inside_a_character_is_shown_to_do_so(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 🦄", add_special_tokens=False)[:-1]
    assert run(byte_level, [delta([*ids, EOS], 0, FinishReason.STOP)])[0] == "ok \ufffd"


def test_stop_strings_are_not_looked_for_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a a a a", add_special_tokens=False)
    deltas = [delta([token], i) for i, token in enumerate(ids)]
    assert run(byte_level, deltas, StopConfig(("a",)))[0] == ""
    assert run(byte_level, deltas, StopConfig(("a",), min_tokens=2))[0] == "a a "


def test_after_a_stop_string_nothing_is_shown_or_counted(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two three", add_special_tokens=False)
    stream = TextStream(byte_level, (), StopConfig(("two",)))
    piece = stream.feed(delta(ids, logprobs=True))
    assert (piece.text, piece.finish_reason, stream.num_tokens) == ("one ", FinishReason.STOP, 2)
    assert piece.stop_string == "two"
    assert [entry.data for entry in piece.logprobs] == [b"one", b" two"]
    at_border = TextStream(byte_level, (), StopConfig((" two",))).feed(delta(ids, logprobs=True))
    assert [entry.data for entry in at_border.logprobs] == [b"one"]
    assert stream.feed(delta([30], 3, FinishReason.LENGTH)).text == ""
    assert stream.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("answer", [" Rome is", "\n\nRome is", "Rome is"])
def test_logprobs_begin_with_the_token_whose_space_was_trimmed(answer: str, size: int) -> None:
    tokenizer = tokenizer_of("qwen3")
    assert tokenizer.reasoning is not None
    stop = StopConfig(thinking=Thinking(tokenizer.reasoning, True), markers="<think></think>")
    stream = TextStream(tokenizer, (), stop)
    ids = tokenizer.encode(f"Hm.</think>{answer}", add_special_tokens=False)
    pieces = [stream.feed(d) for d in in_parts(ids, [size], FinishReason.LENGTH, logprobs=True)]
    assert "".join(piece.text for piece in pieces) == "Rome is"
    entries = [entry.data for piece in pieces for entry in piece.logprobs]
    assert b"".join(entries).decode().lstrip() == "Rome is"


def test_logprob_offsets_count_characters_of_the_text(byte_level: Tokenizer) -> None:
    text = "é 🦄 x"
    ids = byte_level.encode(text, add_special_tokens=False)
    stream = TextStream(byte_level, (), StopConfig())
    entries = stream.feed(delta(ids, 0, FinishReason.LENGTH, logprobs=True)).logprobs
    assert b"".join(entry.data for entry in entries).decode() == text
    whole = [entry for entry in entries if b" x" in entry.data]
    assert [entry.offset for entry in whole] == [text.index(" x")]
