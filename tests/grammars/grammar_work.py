"""How much is built and walked for a grammar, in units that are the same on every machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from serve_app.core.sampling_params import MAX_GRAMMAR_CHARS
from serve_app.grammars import library

MAX_CHARS = 2 * MAX_GRAMMAR_CHARS
MAX_BUILDS = 400
MAX_MASKS = 20_000


@dataclass
class Work:
    """What llguidance was given: so many grammars, of so many characters together, and steps of
    walks."""

    builds: int = 0
    chars: int = 0
    masks: int = 0

    def add(self, text: str) -> None:
        self.builds += 1
        self.chars += len(text)


class _Counted:
    """A matcher whose masks are counted."""

    def __init__(self, matcher: Any, work: Work) -> None:
        self._matcher, self._work = matcher, work

    def compute_bitmask(self) -> bytes:
        self._work.masks += 1
        mask: bytes = self._matcher.compute_bitmask()
        return mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@contextmanager
def counted() -> Iterator[Work]:
    """Counts the real builds that happen meanwhile."""
    work, check, matcher = Work(), library.check, library.matcher

    def checked(text: str) -> None:
        work.add(text)
        check(text)

    def built(of: object, text: str) -> object:
        work.add(text)
        return _Counted(matcher(of, text), work)  # type: ignore[arg-type]

    with patch.object(library, "check", checked), patch.object(library, "matcher", built):
        yield work
