"""Searches stop strings in streamed text. Decides which text is emitted and when it ends.

One Knuth-Morris-Pratt automaton per stop string reads the text by character. So the result does not
depend on the pieces, and the work per character is bounded for all stop strings.
"""

from collections.abc import Sequence


class _Automaton:
    """Tracks how much of one pattern the text ends with (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * len(pattern)
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = self._fallback[k - 1]
            k += pattern[i] == pattern[k]
            self._fallback[i] = k

    def read(self, char: str) -> bool:
        """Read one character. Returns True if the pattern is complete."""
        k = self.matched
        while k and self.pattern[k] != char:
            k = self._fallback[k - 1]
        self.matched = k = k + (self.pattern[k] == char)
        return k == len(self.pattern)


class StopMatcher:
    """Passes text through and holds back only text that may become a stop string.

    The stop string that is complete first wins. Of several that end at the same character, the
    longest wins.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """include: also emit the stop string."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Add text and return the text to emit. Do not call it after `stopped` becomes True."""
        if not self._automata:
            return text
        for i, char in enumerate(text):
            self.found = max((a.pattern for a in self._automata if a.read(char)), key=len, default=None)
            if self.found is not None:
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._include else seen[: -len(self.found)]
        seen = self._held + text
        keep = len(seen) - max(a.matched for a in self._automata)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """End the text and return the text that was held back. Later text is separate."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held
