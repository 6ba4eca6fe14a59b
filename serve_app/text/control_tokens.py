"""Separates control tokens written by the template from those in a client's messages.

A client's control tokens are encoded as text. The prompt is always the template's output for the
unmodified messages.
To find the origin of a token, the chat is rendered a second time with marks around the tokens in
the messages. If the template's logic (`lstrip`, `split`) reacts to these marks, the tokens in the
template's own literals are marked instead. These are all of them or, if the template searches for a
token itself, only those that it writes directly.
The result is used only if it attributes no more tokens to the client than the messages contain.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes

_MARKS = range(0xF0000, 0xFFFFE)
"""The private use characters."""
_MARK = re.compile(r"<[^<>\s]*[|_\uff5c\u2581][^<>\s]*>")


@dataclass(frozen=True, slots=True)
class Chat:
    """The input of a template. special: the special tokens that the template may use."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    special: Mapping[str, str]

    def map(self, change: Callable[[str], str]) -> "Chat":
        """Return this chat with `change` applied to the texts of messages and variables."""
        return Chat(self.template, _map(self.messages, change), _map(self.variables, change), self.special)


def is_mark(token: str) -> bool:
    """Whether a token looks like `<|im_end|>` or `<end_of_turn>`, and not like an HTML tag."""
    return _MARK.fullmatch(token) is not None


def find_pattern(control_tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these tokens, the longest one at each position."""
    longest_first = sorted(control_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def split_forged(
    text: str, chat: Chat, pattern: re.Pattern[str], render: Callable[[Chat], str]
) -> list[tuple[str, bool]]:
    """Split `text` into parts: (part, whether it is a control token written by a client).

    text: the result of `render(chat)`.
    """
    marks = _Marks(*_unused(text, chat), pattern)
    found = marks.parts(render(chat.map(marks.put)))
    if "".join(part for part, _ in found) == text:
        return found
    given: Counter[str] = Counter()
    chat.map(lambda value: given.update(pattern.findall(value)) or value)
    for assigned in (True, False):
        own = marks.parts(_render_marked(chat, marks, assigned))
        # A message that is to be continued ends before the template's text does.
        if "".join(part for part, _ in own).startswith(text):
            parts = _complement(own, pattern, len(text))
            if Counter(part for part, forged in parts if forged) <= given:
                return parts
    return found


def _complement(own: Sequence[tuple[str, bool]], pattern: re.Pattern[str], length: int) -> list[tuple[str, bool]]:
    """Convert `own`, (part, whether it is the template's token), to parts as of `split_forged`.

    length: of the text, in characters.
    """
    parts: list[tuple[str, bool]] = []
    rest = length
    for part, is_own in own:
        shown, rest = part[:rest], max(0, rest - len(part))
        if is_own or not pattern.search(shown):
            parts.append((shown, False))
            continue
        at = 0
        for match in pattern.finditer(shown):
            parts += [(shown[at : match.start()], False), (match[0], True)]
            at = match.end()
        parts.append((shown[at:], False))
    return _joined(parts)


def _joined(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    joined: list[tuple[str, bool]] = []
    for part, forged in parts:
        if joined and not forged and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + part, False)
        else:
            joined.append((part, forged))
    return joined


@dataclass(frozen=True, slots=True)
class _Marks:
    """Marker characters before and after a control token."""

    start: str
    end: str
    pattern: re.Pattern[str]

    def put(self, text: str) -> str:
        """Return `text` with marks around its control tokens."""
        return self.pattern.sub(f"{self.start}\\g<0>{self.end}", text)

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """Split `text` into parts without marks: (part, whether it is a marked token).

        The template may have separated a token from its marks.
        """
        marks = re.compile(f"{self.start}({self.pattern.pattern}){self.end}|[{self.start}{self.end}]")
        return [(part or "", i % 2 == 1) for i, part in enumerate(marks.split(text))]


def _render_marked(chat: Chat, marks: _Marks, assigned: bool) -> str:
    """Render with marks around the control tokens that the template writes; empty if that fails."""
    special = {name: marks.put(token) for name, token in chat.special.items()}
    given = {"documents": None, **special, **chat.variables}
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat.messages]
    try:
        return _marked_template(chat.template, marks, assigned).render(messages=messages, **given)
    except Exception:  # templates may raise any exception
        return ""


@lru_cache(maxsize=8)
def _marked_template(template: str, marks: _Marks, assigned: bool) -> jinja2.Template:
    """Compile the template with marks around the control tokens in the literals that it writes.

    assigned: also in literals that it assigns to variables and may write later.
    """
    # transformers' own environment; there is no public function for it.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: jinja2.Environment = _compile_jinja_template(template).environment
    tree = environment.parse(template)
    for node in [tree] if assigned else [*tree.find_all(nodes.Output)]:
        _mark_literals(node, marks.put)
    return environment.from_string(tree)


def _mark_literals(node: nodes.Node, marked: Callable[[str], str]) -> None:
    match node:
        case nodes.TemplateData():
            node.data = marked(node.data)
        case nodes.Const() if isinstance(node.value, str):
            node.value = marked(node.value)
        case _:
            for part in _written(node):
                _mark_literals(part, marked)


def _written(node: nodes.Node) -> Iterable[nodes.Node]:
    """Yield the parts of `node` whose text may be written, not those for searches or lookups."""
    match node:
        case nodes.Compare() | nodes.Test():
            return ()
        case nodes.Filter() if node.node is not None:
            return (node.node,)
        case nodes.Getitem():
            return (node.node,)
        case nodes.Call() if isinstance(node.node, nodes.Getattr):
            return (node.node,)
        case nodes.Pair():
            return (node.value,)
        case _:
            return node.iter_child_nodes()


def _unused(text: str, chat: Chat) -> tuple[str, str]:
    """Return two mark characters that occur neither in the text nor in the chat."""
    used = {*text, *chat.template}
    chat.map(lambda value: used.update(value) or value)  # type: ignore[func-returns-value]
    first, second = islice((chr(code) for code in _MARKS if chr(code) not in used), 2)
    return first, second


def _map(data: Any, change: Callable[[str], str]) -> Any:
    """Return `data` with `change` applied to every text at any depth, except keys."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _map(value, change) for key, value in data.items()}
    return [_map(item, change) for item in data] if isinstance(data, list | tuple) else data
