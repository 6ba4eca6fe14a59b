"""Answers become messages: reasoning, content and calls, the same however the text was cut, in five
forms of calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.results import FinishReason, TokenDelta
from serve_app.text.message_parser import MessageParser
from serve_app.text.parts import Kind, Part
from serve_app.text.stream import StopConfig, TextStream
from serve_app.text.tool_format import Dialect, ReasoningFormat, Thinking, ToolFormat
from tests.examples import examples
from tests.text.formats import FAMILIES, tokenizer_of

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
}
THINKING = Thinking(ReasoningFormat("<think>", "</think>"), begun=False)
TOOLS = {"weather": PARAMETERS, "weather_now": PARAMETERS}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Rome"},
    {"city": 'a "quoted" \\ name}]\n</parameter', "days": 3},
    {"days": 12, "where": {"at": [1, {"b": "}"}, "x"], "ok": True, "none": None}},
    {"city": "naïve 你好 <tool_call>"},
]


def written(form: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    return f"{form.begin}{name}{form.middle}{_arguments(form.dialect, arguments)}{form.end}"


def _arguments(dialect: Dialect, arguments: dict[str, Any]) -> str:
    if dialect is Dialect.JSON:
        return json.dumps(arguments, ensure_ascii=False)
    if dialect is Dialect.BARE_KEYS:
        return _bare(arguments)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


def _bare(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def message_of(parts: list[Part]) -> dict[str, Any]:
    message: dict[str, Any] = {"calls": []}
    for part in parts:
        if part.kind is Kind.CALL:
            assert part.call == len(message["calls"])
            message["calls"].append([part.text, ""])
        elif part.kind is Kind.ARGUMENTS:
            message["calls"][part.call][1] += part.text
        else:
            message[part.kind] = message.get(part.kind, "") + part.text
    return message


def parse(form: ToolFormat | None, text: str, thinking: Thinking | None = None) -> dict[str, Any]:
    parser = MessageParser(form, TOOLS, thinking)
    return message_of(parser.feed(text) + parser.finish())


def form_of(family: str) -> ToolFormat:
    form = tokenizer_of(family).tool_format
    assert form is not None
    return form


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_call_has_its_name_and_arguments(family: str, arguments: dict[str, Any]) -> None:
    form = form_of(family)
    message = parse(form, written(form, "weather_now", arguments))
    [(name, told)] = message.pop("calls")
    assert (name, json.loads(told)) == ("weather_now", arguments)
    assert not message


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama3_1"}))
def test_text_stands_before_several_calls(family: str) -> None:
    form = form_of(family)
    calls = [written(form, "weather", {"city": city}) for city in ("Rome", "Oslo")]
    message = parse(form, f"Let me see.\n\n{calls[0]}{form.separator}{calls[1]}\n")
    assert message[Kind.CONTENT] == "Let me see."
    assert [json.loads(told)["city"] for _, told in message["calls"]] == ["Rome", "Oslo"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_call_is_content(family: str) -> None:
    form = form_of(family)
    for text in (
        " Just text. ",
        f"{form.begin}",
        f"{form.begin}unknown{form.middle}{{}}{form.end}",
        f"{form.begin}weather{form.middle}none{form.end}",
        f"{form.begin[:-1]}{form.begin[:-1]}weather",
    ):
        assert parse(form, text) == {"calls": [], Kind.CONTENT: text}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_stays_as_far_as_it_came(family: str) -> None:
    form = form_of(family)
    whole = written(form, "weather", {"city": "Rome", "where": {"at": "x"}})
    complete = json.loads(parse(form, whole)["calls"][0][1])
    for end in range(len(whole)):
        message = parse(form, whole[:end])
        if message["calls"]:
            assert json.dumps(complete).startswith(message["calls"][0][1])
            assert Kind.CONTENT not in message
        else:
            assert message.get(Kind.CONTENT, "") == whole[:end]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "gemma4"])
@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_comes_apart_from_the_answer(family: str, begun: bool) -> None:
    tokenizer, form = tokenizer_of(family), form_of(family)
    reasoning = tokenizer.reasoning
    assert reasoning is not None
    thought = f"{'' if begun else reasoning.open}\nHm.\n\nWell.\n{reasoning.close}\n\n"
    thinking = Thinking(reasoning, begun)
    assert parse(form, thought + "Yes. ", thinking) == {"calls": [], "reasoning": "Hm.\n\nWell.", "content": "Yes. "}
    message = parse(form, thought + written(form, "weather", {"city": "Rome"}), thinking)
    assert message[Kind.REASONING] == "Hm.\n\nWell."
    assert Kind.CONTENT not in message
    assert len(message["calls"]) == 1
    if not begun:
        assert parse(form, "Yes.", thinking) == {"calls": [], "content": "Yes."}


@st.composite
def answers(draw: st.DrawFn, family: str) -> str:
    """Texts full of calls, cut calls, and marks in wrong places."""
    tokenizer, form = tokenizer_of(family), form_of(family)
    marks = [form.begin, form.middle, form.end, form.anchor, form.separator or "", "weather", "{", "}", "<", "\n", '"']
    if tokenizer.reasoning is not None:
        marks += [tokenizer.reasoning.open, tokenizer.reasoning.close]
    call = st.builds(written, st.just(form), st.sampled_from(list(TOOLS)), st.sampled_from(ARGUMENTS))
    cut = st.builds(lambda text, end: text[:end], call, st.integers(0, 80))
    part = st.one_of(st.sampled_from(marks), call, cut, st.text(alphabet="ab <>\n é你", max_size=6))
    return "".join(draw(st.lists(part, max_size=8)))


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_every_split_into_deltas_adds_up_to_the_whole(family: str, data: st.DataObject) -> None:
    tokenizer, form = tokenizer_of(family), form_of(family)
    ids = tokenizer.encode(data.draw(answers(family)), add_special_tokens=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    thinking = tokenizer.reasoning and Thinking(tokenizer.reasoning, data.draw(st.booleans()))
    finish_reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    if finish_reason is FinishReason.STOP:
        ids = [*ids, tokenizer.encode("<|im_end|>")[0]]

    def accumulate(cuts: list[int]) -> tuple[dict[str, Any], int]:
        stream = TextStream(tokenizer, (), StopConfig(markers=f"{form.markers}<think></think><|channel><channel|>"))
        parser = MessageParser(form, TOOLS, thinking)
        parts: list[Part] = []
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            reason = finish_reason if end == len(ids) else None
            if stream.finish_reason is None:
                parts += parser.feed(
                    stream.feed(TokenDelta("x", 0, start, tuple(ids[start:end]), finish_reason=reason)).text
                )
        return message_of(parts + parser.finish()), parser.num_calls

    assert accumulate(sorted(cuts)) == accumulate([])


@pytest.mark.parametrize("family", FAMILIES)
def test_little_text_is_held_back(family: str) -> None:
    """So that no text is looked at more than a few times."""
    form = form_of(family)
    hard = [" \n" * 5_000, form.begin * 400, "<" * 10_000, written(form, "weather", {"city": "a<" * 5_000})]
    for text in hard:
        parser = MessageParser(form, TOOLS, THINKING)
        told = 0
        for at in range(0, len(text), 3):
            told += sum(len(part.text) for part in parser.feed(text[at : at + 3]))
            assert len(parser._held) < 100
        assert told > 0.9 * len(text) or text.isspace()
