"""Builds one grammar for an answer with reasoning, tool calls or a constrained form."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app import grammars
from serve_app.text.argument_grammar import TAG_TEXT, ArgumentRules
from serve_app.text.tool_format import Dialect, Thinking, ToolFormat

_FREE_TEXT = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the answer may call.

    schema: of its arguments, if enforced; None allows any object.
    """

    name: str
    schema: Mapping[str, Any] | None
    param: str


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may contain.

    required: it contains only calls. several: more than one is allowed.
    """

    form: ToolFormat
    tools: Sequence[CallableTool]
    required: bool
    several: bool


def message_grammar(
    calls: Calls | None,
    answer: str | None,
    thinking: Thinking | None,
    special_ids: Mapping[str, int],
) -> str:
    """Return the grammar of a message.

    It is optional `thinking`, then `calls`, text of the grammar `answer`, or any text. special_ids:
    special tokens, which text in a grammar never matches. Raises `InvalidRequestError`.
    """
    builder = _Builder(special_ids)
    body = builder.body(calls, answer, thinking)
    start = body if thinking is None else builder.after_thinking(thinking, body)
    return grammars.compose("\n".join([f"start: {start}", *builder.rules]), builder.parts, param="tools")


class _Builder:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        alternatives = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(alternatives) or '(?!)'})")
        self.rules: list[str] = []
        self.parts: dict[str, str] = {}

    def body(self, calls: Calls | None, answer: str | None, thinking: Thinking | None) -> str:
        if answer is not None:
            self.parts["answer"] = answer
        if calls is None:
            if answer is not None:
                return "@answer"
            # An answer that starts with the opening mark must be a reasoning, or the lexer would
            # read it all as text.
            opened = (
                "" if thinking is None or thinking.begun else f" & ~/\\s*{pattern(thinking.form.open)}{_FREE_TEXT}/"
            )
            self.rules.append(f"TEXT: /{_FREE_TEXT}/{opened}")
            return "TEXT?"
        self._add_calls(calls, beside_json=answer is not None)
        if calls.required:
            return "begin calls"
        if answer is not None:
            return "(@answer | begin calls)"
        # Free text without a call, then optional calls.
        anchor = calls.form.anchor
        if anchor in self._special_ids:
            self.rules.append(f"TEXT: /{_FREE_TEXT}/")
            return "TEXT? (begin calls)?"
        if anchor:
            mark = pattern(anchor)
            self.rules.append(f"TEXT: /{_FREE_TEXT}/ & ~/{_FREE_TEXT}{mark}{_FREE_TEXT}/")
            self.rules.append(f"to_call[lazy]: /{_FREE_TEXT}{mark}/")
            return f"(TEXT? | to_call {self.literal(calls.form.begin.removeprefix(anchor))} calls)"
        self.rules.append(f"TEXT: /{_FREE_TEXT}/ & ~/\\s*{pattern(calls.form.begin)}{_FREE_TEXT}/")
        return "(TEXT? | begin calls)"

    def _add_calls(self, calls: Calls, *, beside_json: bool) -> None:
        form = calls.form
        begin = form.begin if form.anchor or not beside_json else ""
        arguments = ArgumentRules(form.dialect, self.literal)
        for i, tool in enumerate(calls.tools):
            head = f"{tool.name}{form.middle}"
            written = self.literal(head) if begin else _json_lexemes(form.begin + head)
            self.rules.append(f"call_{i}: {written} {arguments.add(tool.schema, tool.param)}")
        if form.dialect is Dialect.TAGS:
            self.rules.append(TAG_TEXT)
        more = ""
        if calls.several and form.separator is not None:
            more = f" ({self.literal(form.separator + begin)} call)*"
        self.rules += [
            f"begin: {self.literal(begin)}",
            f"calls: call{more}",
            f"call: ({' | '.join(f'call_{i}' for i in range(len(calls.tools)))}) {self.literal(form.end)}",
            *arguments.rules,
        ]
        self.parts |= arguments.parts

    def after_thinking(self, thinking: Thinking, body: str) -> str:
        close = thinking.form.close
        if close in self._special_ids:
            self.rules += [f"THOUGHT: /{_FREE_TEXT}/", f"thought: THOUGHT? {self.literal(close)}"]
        else:
            self.rules.append(f"thought[lazy]: /{_FREE_TEXT}{pattern(close)}/")
        self.rules += ["GAP: /[ \\n]{1,4}/", f"body: {body}"]
        if thinking.begun:
            return "thought GAP? body"
        return f"({self.literal(thinking.form.open)} thought GAP? body | body)"

    def literal(self, text: str) -> str:
        """Return a rule for exactly this text, with its special tokens as tokens."""
        parts = [part for part in self._special.split(text) if part]
        written = (
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else json.dumps(part, ensure_ascii=False)
            for part in parts
        )
        return " ".join(written) or '""'


def _json_lexemes(text: str) -> str:
    """Return lexemes for the start of a JSON object.

    They are cut as in a JSON answer's grammar, so that both can match.
    """
    return " ".join(json.dumps(part) for part in re.findall(r'"[^"]*"|[^"]+', text))


def pattern(text: str) -> str:
    """Return a regex for exactly this text, for use between slashes."""
    escaped = {"\n": "\\n", "/": "\\/"}
    return "".join(escaped.get(char) or re.escape(char) for char in text)
