"""A GGUF file's metadata under its architecture's prefix. Records which keys were used.

Every key that `gguf_config` reads counts as used. The remaining keys are harmless or refused.
"""

import math
from typing import Any

from serve_app.checkpoints.gguf_header import Field, GgufHeader
from serve_app.errors import ConfigError

_REQUIRED: Any = object()
_MOST = 2**28
"""Larger than any count in a model. Without a limit, a damaged file could use all memory."""


class Metadata:
    """Reads keys, given without the prefix. refused: the reason for each unsupported key (with
    prefix).
    """

    def __init__(self, header: GgufHeader, source: object, architecture: str) -> None:
        """source: location of the file, for messages."""
        self.architecture = architecture
        self.refused: dict[str, str] = {}
        self.used_tensors: set[str] = set()
        self._fields = header.fields
        self._source = source
        self._used: set[str] = set()

    def left_over(self) -> list[str]:
        """Return the file's keys that were not read, with prefix."""
        return [key for key in self._fields if key not in self._used]

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key. An array of equal values counts as one value. Any other array
        is refused, and `default` is returned.

        Raises ConfigError if there is no default and the key is missing or its values differ.
        """
        field = self._use(key)
        if field is None:
            if default is _REQUIRED:
                raise self.error(f"its metadata has no {self.architecture}.{key}")
            return default
        value = field.value
        if not isinstance(value, list):
            return value
        if value and all(element == value[0] for element in value):
            return value[0]
        if default is _REQUIRED:
            raise self.error(f"{self.architecture}.{key} differs between layers, which is not supported")
        self.refuse(key, "it differs between layers")
        return default

    def whole(self, key: str) -> Any:
        """Return the value of a key, with arrays unchanged. None if it is missing."""
        field = self._use(key)
        return None if field is None else field.value

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """Return a positive integer below `_MOST`. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if type(value) is not int or not 0 < value < _MOST:
            raise self.error(
                f"{self.architecture}.{key} is {value!r}, and must be a positive whole number below {_MOST}"
            )
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a finite number. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean. Raises ConfigError for anything else."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be a string")
        return value

    def expect(self, key: str, computed: Any) -> None:
        """Refuse the key if its value differs from the one that is computed."""
        value = self.value(key, computed)
        if value != computed and not (isinstance(value, float) and math.isclose(value, computed, rel_tol=1e-5)):
            self.refuse(key, f"{value!r}, but the module uses {computed!r}")

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a key under the prefix."""
        self.refused[f"{self.architecture}.{key}"] = reason

    def use_tensor(self, name: str) -> None:
        """Mark a tensor as used that is not a parameter of the module."""
        self.used_tensors.add(name)

    def error(self, problem: str) -> ConfigError:
        """Return an error about the file."""
        return ConfigError(f"model: {self._source}: {problem}")

    def _use(self, key: str) -> Field | None:
        whole = f"{self.architecture}.{key}"
        self._used.add(whole)
        return self._fields.get(whole)
