"""Rewrites conversations for chat templates that accept only some orders of roles.

What a template accepts is found by rendering it once. A message that it would refuse or drop
becomes part of a neighbouring message's text. Order and words do not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

Render = Callable[[Sequence[dict[str, Any]]], str]


def _message(role: str, i: int) -> dict[str, Any]:
    extra = {"tool_call_id": "probe0000"} if role == "tool" else {}
    return {"role": role, "content": f"probe {i} ends", **extra}


@dataclass(frozen=True, slots=True)
class TemplateOrder:
    """The orders of roles that a chat template supports without dropping a message."""

    system: bool
    """A system message at the start."""
    systems: bool
    """Several system messages at the start."""
    late_system: bool
    """A system message in mid-conversation."""
    repeats: bool
    """The same role twice in a row."""
    lone_result: bool
    """A tool result without a preceding call."""

    @classmethod
    def of(cls, render: Render) -> Self:
        """Return the orders that the template of `render` supports."""

        def takes(*roles: str) -> bool:
            messages = [_message(role, i) for i, role in enumerate(roles)]
            try:
                text = render(messages)
            except Exception:  # templates may raise any exception
                return False
            return all(message["content"] in text for message in messages)

        return cls(
            system=takes("system", "user"),
            systems=takes("system", "system", "user"),
            late_system=takes("user", "system", "user") and takes("user", "assistant", "system"),
            repeats=takes("user", "user") and takes("user", "assistant", "assistant", "user"),
            lone_result=takes("user", "tool"),
        )

    @property
    def takes_all(self) -> bool:
        """Whether the template supports every order."""
        return all(getattr(self, field.name) for field in fields(self))


def fold(messages: Sequence[dict[str, Any]], order: TemplateOrder) -> list[dict[str, Any]]:
    """Return the conversation in a form that the template accepts, as far as possible."""
    if order.takes_all:
        return list(messages)
    folded: list[dict[str, Any]] = []
    loose = False
    """Whether the last message was replaced by text of another role."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "system" and _leads(messages, i) and order.system:
            if folded and not order.systems:
                folded[-1] = _merged(folded[-1], message)
            else:
                folded.append(message)
            continue
        moved = (role == "system" and not (order.late_system and order.system)) or (
            role == "tool" and not order.lone_result and not _follows_call(messages, i)
        )
        adapted = {"role": "user", "content": message["content"]} if moved else message
        same = bool(folded) and folded[-1]["role"] == adapted["role"] and adapted["role"] in ("user", "assistant")
        if same and (moved or loose or not order.repeats):
            folded[-1] = _merged(folded[-1], adapted)
        else:
            folded.append(adapted)
        loose = moved
    return folded


def _leads(messages: Sequence[dict[str, Any]], i: int) -> bool:
    return all(message["role"] == "system" for message in messages[:i])


def _follows_call(messages: Sequence[dict[str, Any]], i: int) -> bool:
    before = next((message for message in reversed(messages[:i]) if message["role"] != "tool"), None)
    return before is not None and bool(before.get("tool_calls"))


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two messages of the same role."""
    texts = [message["content"] for message in (first, second) if message["content"]]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    both = {**first, **second, "content": "\n\n".join(texts)}
    return {**both, "tool_calls": calls} if calls else both
