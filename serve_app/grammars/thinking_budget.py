"""How many tokens a model may think: when they are used up, its reasoning is closed by force.

Where an output stands is a function of its tokens, as in a grammar; `grammars` joins the two and speaks for both.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum, auto
from typing import NamedTuple, Self

_HEAD = "thinking "


class Phase(Enum):
    """Where an output is."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class Stage(NamedTuple):
    """How far an output has come.

    text: all of it so far (BEFORE), or its end (INSIDE). num_tokens: of the reasoning. num_closing: tokens of the
    closing mark that were forced.
    """

    phase: Phase
    text: bytes = b""
    num_tokens: int = 0
    num_closing: int = 0


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """`max_tokens` between the marks `open` and `close`. `open` is empty where the prompt has opened the reasoning."""

    max_tokens: int
    open: str
    close: str

    def before(self, grammar: str) -> str:
        """`grammar` with this budget, as one text."""
        return f"{_HEAD}{json.dumps(astuple(self))}\n{grammar}"

    @classmethod
    def split(cls, text: str) -> tuple[Self | None, str]:
        """What `before` has joined."""
        if not text.startswith(_HEAD):
            return None, text
        head, _, grammar = text.removeprefix(_HEAD).partition("\n")
        return cls(*json.loads(head)), grammar

    def start(self) -> Stage:
        """Before the first token."""
        return Stage(Phase.BEFORE if self.open else Phase.INSIDE)

    def advance(self, stage: Stage, data: bytes, *, closing: bool) -> Stage:
        """After one more token, of these bytes. closing: it is what `rest` wanted next."""
        text = stage.text + data
        if stage.phase is Phase.BEFORE:
            mark, solid = self.open.encode(), text.lstrip()
            if solid.startswith(mark):
                return Stage(Phase.INSIDE)
            return Stage(Phase.BEFORE, text) if mark.startswith(solid) else Stage(Phase.AFTER)
        if stage.phase is Phase.AFTER or self.close.encode() in text:
            return Stage(Phase.AFTER)
        keep = len(self.close.encode()) + 4
        return Stage(Phase.INSIDE, text[-keep:], stage.num_tokens + 1, stage.num_closing + 1 if closing else 0)

    def rest(self, stage: Stage, close_ids: Sequence[int]) -> Sequence[int]:
        """Tokens that must come next: the closing mark's, once the budget is used up and the last character whole."""
        if stage.phase is not Phase.INSIDE or stage.num_tokens < self.max_tokens or not _is_whole(stage.text):
            return ()
        return close_ids[stage.num_closing :]


def _is_whole(text: bytes) -> bool:
    """Whether UTF-8 text ends with its last character's last byte."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte < 0x80:
            return True
        if byte >= 0xC0:  # the first byte of a character says how long that is
            return length >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
