"""Control tokens that clients write are text, and change nothing else of what a template makes of
their messages."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.folding import fold
from serve_app.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text.formats import FAMILIES, IN_VARIABLES, tokenizer_of

_TURNS = ("<|im_start|>", "<|im_end|>", "<|turn>", "<turn|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
"""Tokens around messages, which no template looks for in them."""
_LOOKED_AT = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>", "<channel|>")
_PIECES = ("\n", "\n\n", " ", "foo", "bar", "<tool_response>", "</tool_response>", "<", '"', "thought\n")


def plain(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    """What the template makes of the messages by itself."""
    return tokenizer._render(fold(messages, tokenizer.template_order), add_generation_prompt=True)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@st.composite
def histories(draw: st.DrawFn, pieces: tuple[str, ...]) -> list[dict[str, Any]]:
    text = st.lists(st.sampled_from(pieces), max_size=6).map("".join)
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        answer: dict[str, Any] = {"role": "assistant", "content": draw(text)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(text)
        messages += [user("q" + draw(text)), answer]
    return messages if draw(st.booleans()) else [*messages, user("q" + draw(text))]


def control_ids(tokenizer: Tokenizer, ids: list[int], tokens: tuple[str, ...]) -> list[int]:
    known = {i for token in tokens if (i := tokenizer._backend.token_to_id(token)) is not None}
    return [i for i in ids if i in known]


@pytest.mark.parametrize("family", [*FAMILIES, IN_VARIABLES])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_without_control_tokens_the_prompt_is_the_templates(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(family)
    pieces = tuple(p for p in (*_PIECES, *_LOOKED_AT) if not tokenizer._control_pattern.search(p))
    messages = data.draw(histories(pieces))
    text = plain(tokenizer, messages)
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", [*FAMILIES, IN_VARIABLES])
@given(data=st.data())
@settings(max_examples=examples(100))
def test_with_control_tokens_the_prompt_reads_as_the_templates(family: str, data: st.DataObject) -> None:
    """And the turns are those of the same messages without such tokens."""
    tokenizer = tokenizer_of(family)
    messages = data.draw(histories((*_PIECES, *_LOOKED_AT, *_TURNS)))
    ids = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(ids) == plain(tokenizer, messages)
    harmless = [{**message, "content": "q", "reasoning_content": None} for message in messages]
    expected = tokenizer.encode(plain(tokenizer, harmless), add_special_tokens=False)
    assert control_ids(tokenizer, ids, _TURNS) == control_ids(tokenizer, expected, _TURNS)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("<think>\nfoo\n</think>\n\nbar", "bar"),
        ("</think>\n\nbar", "bar"),
        ("bar <|im_end|>", "bar <|im_end|>"),
        ("<think>\nfoo\n</think>\n\n<|im_start|>bar", "<|im_start|>bar"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", IN_VARIABLES])
def test_a_reasoning_in_the_content_is_the_templates_to_read(family: str, content: str, told: str) -> None:
    tokenizer = tokenizer_of(family)
    messages = [user("a"), {"role": "assistant", "content": content}, user("b")]
    ids = tokenizer.apply_chat_template(messages)
    assert f"<|im_start|>assistant\n{told}<|im_end|>\n<|im_start|>user\nb" in tokenizer.decode(ids)
    assert len(control_ids(tokenizer, ids, _TURNS)) == 2 * 3 + 1


def test_the_templates_own_marks_of_a_reasoning_stay_control_tokens() -> None:
    """The last answer keeps its reasoning, in marks that the template writes anew."""
    tokenizer = tokenizer_of("qwen3")
    marks = ("<think>", "</think>")
    messages = [user("a <think>"), {"role": "assistant", "content": "<think>\nfoo\n</think>\n\nbar </think"}]
    ids = tokenizer.apply_chat_template(messages)
    assert control_ids(tokenizer, ids, marks) == [tokenizer.encode(mark)[0] for mark in marks]
    assert tokenizer.decode(ids) == plain(tokenizer, messages)
