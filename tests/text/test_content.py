"""Stop strings, `min_tokens` and log-probabilities are those of an answer's content, however its
tokens come."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.results import LOGPROBS, FinishReason, TokenDelta, TokenLogprob
from serve_app.text.message_parser import MessageParser
from serve_app.text.parts import Kind, Part, joined
from serve_app.text.stop import StopMatcher
from serve_app.text.stream import StopConfig, TextStream
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_format import Thinking
from tests.examples import examples
from tests.text.formats import FAMILIES, tokenizer_of
from tests.text.test_message_parser import TOOLS, answers
from tests.text.test_stop import stopped_by_search

Told = tuple[list[Part], list[bytes], FinishReason | None, str | None, int]


def told(tokenizer: Tokenizer, ids: list[int], stop: StopConfig, cuts: list[int], reason: FinishReason) -> Told:
    """What deltas that end at `cuts` add up to."""
    stream = TextStream(tokenizer, (), stop)
    parts: list[Part] = []
    logprobs: list[bytes] = []
    found = None
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        entries = tuple(TokenLogprob(i, -0.5, ()) for i in ids[start:end])
        ending = reason if end == len(ids) else None
        new = tuple(ids[start:end])
        piece = stream.feed(TokenDelta("x", 0, start, new, finish_reason=ending, results={LOGPROBS: entries}))
        parts += piece.parts
        logprobs += [token.data for token in piece.logprobs]
        found = piece.stop_string or found
    return joined(parts), logprobs, stream.finish_reason, found, stream.num_tokens


def config(family: str, thinking: Thinking | None, stops: list[str], least: int = 0) -> StopConfig:
    form = tokenizer_of(family).tool_format
    assert form is not None
    markers = f"{form.markers}<think></think><|channel><channel|>[THINK][/THINK]"
    return StopConfig(tuple(stops), min_tokens=least, markers=markers, thinking=thinking, tools=form, parameters=TOOLS)


def cut_by_search(whole: list[Part], stops: list[str]) -> tuple[list[Part], str | None]:
    """The slow twin: the parts up to the first stop string in one of the contents."""
    parts: list[Part] = []
    for part in whole:
        if part.kind is Kind.CONTENT:
            text, found = stopped_by_search(part.text, stops, include=False)
            if found is not None:
                return [*parts, Part(part.kind, text, part.call)] if text else parts, found
        parts.append(part)
    return parts, None


def with_dropped_space(parts: list[Part], text: str) -> list[Part]:
    """The parts, each content with the white space behind it, which an answer drops in front of a
    call."""
    pairs = [(part, text[part.end :] if part.kind is Kind.CONTENT else "") for part in parts]
    return [replace(p, text=p.text + rest[: len(rest) - len(rest.lstrip())]) for p, rest in pairs]


def words(parts: list[Part]) -> list[tuple[Any, ...]]:
    return [(part.kind, part.text, part.call) for part in parts]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_the_first_stop_string_in_the_content_ends_the_answer(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(data.draw(answers(family)), add_special_tokens=False)
    thinking = tokenizer.reasoning and Thinking(tokenizer.reasoning, data.draw(st.booleans()))
    stop_string = st.one_of(
        st.sampled_from(["\n", "\n\n", "<", "</", "weather", "_call", "ab", "{", "}"]),
        st.text(alphabet="ab <>\n", min_size=1, max_size=3),
    )
    stops = data.draw(st.lists(stop_string, max_size=3))
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    if reason is FinishReason.STOP:
        ids = [*ids, tokenizer.encode("<|im_end|>")[0]]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    stop = config(family, thinking, stops)
    whole = told(tokenizer, ids, stop, [], reason)
    assert told(tokenizer, ids, stop, cuts, reason) == whole
    free, _, _, _, _ = told(tokenizer, ids, config(family, thinking, []), [], reason)
    shown_text = tokenizer.detokenizer((), markers=stop.markers)
    parts, found = cut_by_search(with_dropped_space(free, "".join(map(shown_text.step, ids))), stops)
    shown, _, ended_by, stop_string_told, _ = whole
    if found is None:
        assert (words(shown), ended_by, stop_string_told) == (words(free), reason, None)
    else:
        assert (ended_by, stop_string_told) == (FinishReason.STOP, found)
        # White space between content and a call is not shown, but it is searched, since it comes
        # before the call.
        assert words(shown) == words(parts) or [p.text.rstrip() for p in shown] == [p.text.rstrip() for p in parts]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_log_probabilities_are_those_of_the_tokens_that_the_content_holds(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(data.draw(answers(family)), add_special_tokens=False)
    thinking = tokenizer.reasoning and Thinking(tokenizer.reasoning, data.draw(st.booleans()))
    parts, logprobs, _, _, _ = told(tokenizer, ids, config(family, thinking, []), [], FinishReason.LENGTH)
    contents = [part for part in parts if part.kind is Kind.CONTENT]
    shown = tokenizer.detokenizer(markers=config(family, None, []).markers)
    offset, expected = 0, []
    for token_id in ids:
        end = offset + len(shown.step(token_id))
        if any(offset < part.end and (part.at <= offset or part.at < end) for part in contents):
            expected.append(tokenizer.token_bytes(token_id))
        offset = end
    assert logprobs == expected or (logprobs[: len(expected)] == expected and contents[-1].end == offset)


def test_a_stop_string_in_reasoning_or_marks_is_none() -> None:
    tokenizer = tokenizer_of("qwen3_5_think")
    assert tokenizer.reasoning is not None
    thinking = Thinking(tokenizer.reasoning, begun=True)
    ids = tokenizer.encode("alpha alpha\n</think>\n\nBeta alpha.", add_special_tokens=False)
    for stop, content in (("alpha", "Beta "), ("</", "Beta alpha."), ("\n\n", "Beta alpha."), ("think", "Beta alpha.")):
        parts, logprobs, _, found, _ = told(
            tokenizer, ids, config("qwen3_5_think", thinking, [stop]), [], FinishReason.LENGTH
        )
        assert words(parts) == [(Kind.REASONING, "alpha alpha", 0), (Kind.CONTENT, content, 0)]
        assert found == (stop if content == "Beta " else None)
        assert b"".join(logprobs).decode().startswith(content)


def test_min_tokens_are_the_contents() -> None:
    tokenizer = tokenizer_of("qwen3_5_think")
    assert tokenizer.reasoning is not None
    thinking = Thinking(tokenizer.reasoning, begun=True)
    ids = tokenizer.encode("one two three four\n</think>\n\na a a a a a", add_special_tokens=False)
    stop = config("qwen3_5_think", thinking, [" a"], least=4)
    parts, _, _, _, _ = told(tokenizer, ids, stop, [], FinishReason.LENGTH)
    assert parts[-1].text == "a a"  # behind two new lines


def test_text_that_is_held_for_a_stop_string_waits_for_nothing_else() -> None:
    """A call behind it shows at once, and white space that a stop string needs does not wait for a
    word."""
    form = tokenizer_of("hermes").tool_format
    assert form is not None
    parser = MessageParser(form, TOOLS, stops=StopMatcher(("\nUser:",)))
    assert [part.text for part in parser.feed("Hi.\n")] == ["Hi."]
    assert [part.kind for part in parser.feed(f"{form.begin}weather{form.middle}{{")] == [Kind.CALL, Kind.ARGUMENTS]
    parser = MessageParser(form, TOOLS, stops=StopMatcher(("\n",)))
    assert [part.text for part in parser.feed("Hi.\n")] == ["Hi."]
    assert parser.stopped
