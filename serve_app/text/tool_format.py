"""The model's format of tool calls and reasoning, detected once per model from its chat template.

A template with tools is rendered with a conversation that contains calls. The text around name and
arguments gives the model's markers. The grammar (`tool_grammar`) and the parser (`message_parser`)
both use this object, so they agree.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os.path import commonprefix
from typing import Any

from serve_app.core.sampling_params import ThinkingBudget


class Dialect(StrEnum):
    """The syntax of a call's arguments."""

    JSON = "json"
    """`{"city": "Rome"}`"""
    TAGS = "tags"
    """`<parameter=city>\\nRome\\n</parameter>\\n`. Values other than text are JSON."""
    BARE_KEYS = "bare_keys"
    """`{city:<|"|>Rome<|"|>}`: keys without quotes, strings between special marks."""


QUOTE = '<|"|>'
"""Starts and ends a string in `Dialect.BARE_KEYS`."""
UNREADABLE = "arguments"
"""Name of the argument that holds, as text, an earlier call's arguments that are not an object."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `begin`, name, `middle`, arguments, `end`, which may be empty.

    separator: between two calls; None allows only one call.
    anchor: the part of `begin` that occurs in no other text. Without one, a call must be the whole
    answer.
    text_arguments: the template takes the arguments of earlier calls as JSON text, not as an
    object.
    in_template: the chat template writes tools, calls and results; otherwise `hermes` does.
    """

    begin: str
    middle: str
    end: str
    separator: str | None
    dialect: Dialect = Dialect.JSON
    text_arguments: bool = False
    in_template: bool = True

    @property
    def anchor(self) -> str:
        """The part of `begin` that identifies a call; empty if there is none."""
        found = re.match(r"<[^<>\s]+>|\[[A-Z_]+\]", self.begin)
        return found[0] if found else ""

    @property
    def markers(self) -> str:
        """A text that contains every marker."""
        return "\n".join((self.begin, self.middle, self.end, QUOTE if self.dialect is Dialect.BARE_KEYS else ""))


HERMES = ToolFormat(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    in_template=False,
)
"""The format of most open models, used by a system prompt for models without one (see `hermes`)."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks before and after a model's reasoning."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that an answer may start with. begun: the prompt ends with its opening mark."""

    form: ReasoningFormat
    begun: bool

    def bounded(self, max_tokens: int) -> ThinkingBudget:
        """Return a budget of `max_tokens` for this reasoning."""
        return ThinkingBudget(max_tokens, "" if self.begun else self.form.open, self.form.close)


Render = Callable[..., str]
"""(messages, tools=..., add_generation_prompt=...) -> text. May raise any exception of a template.
"""

_PAIRS = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"), ("[THINK]", "[/THINK]"))
_NAME, _KEY, _VALUE, _THOUGHT = "probe_name", "probe_key", "probe value", "probe thought"
_USER = {"role": "user", "content": "probe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "probe"}},
            "required": [_KEY],
        },
    },
}
_WRITTEN = {
    Dialect.JSON: json.dumps({_KEY: _VALUE}),
    Dialect.TAGS: f"<parameter={_KEY}>\n{_VALUE}\n</parameter>\n",
    Dialect.BARE_KEYS: f"{{{_KEY}:{QUOTE}{_VALUE}{QUOTE}}}",
}


def find_reasoning(render: Render) -> ReasoningFormat | None:
    """Return the marks that the template writes around `reasoning_content`; None if it has no
    reasoning."""
    call = _message(1, text_arguments=False)
    thought = {"reasoning_content": _THOUGHT, "reasoning": _THOUGHT}
    with_call = _try(render, [_USER, {**call, **thought}], tools=[_TOOL])
    plain = _try(render, [_USER, {"role": "assistant", "content": "probe", **thought}])
    for text in (with_call, plain):
        before, found, after = (text or "").partition(_THOUGHT)
        for pair in _PAIRS:
            if found and pair[0] in before and pair[1] in after:
                return ReasoningFormat(*pair)
    return None


def find_tool_format(
    render: Render, control_tokens: Sequence[str], reasoning: ReasoningFormat | None
) -> ToolFormat | None:
    """Return the template's call format; None if it has no tools or an unsupported format.

    control_tokens: tokens that may end a text with only one call.
    """
    if _NAME not in (_try(render, [_USER], tools=[_TOOL]) or ""):
        return None
    for text_arguments in (False, True):
        turn = _turn(render, 1, text_arguments, reasoning)
        for dialect, written in _WRITTEN.items():
            before, _, after = turn.partition(_NAME)
            middle, found, rest = after.partition(written)
            if not found or len(middle) > 64:
                continue
            begin = before.lstrip()
            if not begin.startswith(("<", "[", "{")):
                continue
            two = _turn(render, 2, text_arguments, reasoning).split(written)
            end, separator = _ends(two, begin + _NAME + middle, rest, control_tokens)
            form = ToolFormat(begin, middle, end, separator, dialect, text_arguments)
            # A JSON object ends by itself; the next call is known by its anchor.
            if end or (dialect is Dialect.JSON and separator is not None and form.anchor):
                return form
    return None


def _ends(two: list[str], head: str, rest: str, control_tokens: Sequence[str]) -> tuple[str, str | None]:
    """Return (end, separator) from a turn of two calls, else from the text after one call.

    two: the turn, cut at the calls' arguments.
    """
    if len(two) == 3 and two[1].endswith(head):
        between = two[1].removesuffix(head)
        end = commonprefix([between, two[2]]).rstrip()
        if end or not between:
            return end, between[len(end) :]
    stops = [at for token in control_tokens if (at := rest.find(token)) >= 0]
    return rest[: min(stops, default=len(rest))].rstrip(), None


def _turn(render: Render, num_calls: int, text_arguments: bool, reasoning: ReasoningFormat | None) -> str:
    """Return the text that a turn with calls adds to the prompt, without reasoning."""
    prompt = _try(render, [_USER], tools=[_TOOL], add_generation_prompt=True) or ""
    whole = _try(render, [_USER, _message(num_calls, text_arguments)], tools=[_TOOL]) or ""
    turn = whole[len(commonprefix([prompt, whole])) :]
    head, name, rest = turn.partition(_NAME)
    if reasoning is not None:
        head = head.rpartition(reasoning.close)[2]
    return head + name + rest


def _message(num_calls: int, text_arguments: bool) -> dict[str, Any]:
    arguments = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if text_arguments else arguments}
    calls = [{"id": f"probe000{i}", "type": "function", "function": function} for i in range(num_calls)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _try(render: Render, messages: Sequence[dict[str, Any]], **how: Any) -> str | None:
    try:
        return render(messages, **how)
    except Exception:  # a template may raise any exception: it does not support this turn
        return None
