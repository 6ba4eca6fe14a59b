"""The tokens of a reasoning are counted, its marks included, and those of the answer are not."""

import pytest

from serve_app.text.reasoning_tokens import ReasoningTokens
from serve_app.text.tool_format import ReasoningFormat, Thinking

FORM = ReasoningFormat("<think>", "</think>")


@pytest.mark.parametrize(
    ("begun", "tokens", "count"),
    [
        (False, ["<think>", "Hm", ".", "</think>", "\n\n", "Yes"], 4),
        (False, ["\n", "<th", "ink>H", "m", "</", "think>Yes", "."], 6),
        (False, ["Yes", "<think>", "Hm"], 0),
        (False, ["<th", "e>", "x"], 0),
        (False, ["<think>Hm</think>", "Yes"], 1),
        (False, [" " * 65, "<think>", "Hm"], 0),
        (False, ["<think>", "Hm"], 2),
        (True, ["Hm", "</think>", "Yes", "</think>"], 2),
        (True, ["Hm", "."], 2),
        (False, [], 0),
    ],
)
def test_reasoning_is_counted(begun: bool, tokens: list[str], count: int) -> None:
    reasoning = ReasoningTokens(Thinking(FORM, begun))
    for token in tokens:
        reasoning.read(token)
    assert reasoning.count == count
