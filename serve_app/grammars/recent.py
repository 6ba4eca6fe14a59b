"""A cache of values by text, in limited memory."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """An LRU cache of values by text. Thread-safe."""

    def __init__(self, max_values: int, max_chars: int) -> None:
        """max_chars: total length of all texts."""
        self._max_values, self._max_chars = max_values, max_chars
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._chars = 0
        self._lock = Lock()

    def get(self, text: str) -> Value | None:
        """Return the value of a text; None if not cached."""
        with self._lock:
            value = self._values.get(text)
            if value is not None:
                self._values.move_to_end(text)
            return value

    def put(self, text: str, value: Value) -> None:
        """Cache a value."""
        with self._lock:
            if text in self._values:
                return
            self._values[text] = value
            self._chars += len(text)
            while len(self._values) > self._max_values or self._chars > self._max_chars:
                oldest, _ = self._values.popitem(last=False)
                self._chars -= len(oldest)
