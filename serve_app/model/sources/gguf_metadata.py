"""The metadata of a GGUF file under its architecture's prefix, and which of it was used.

Every key that `gguf_config` reads is used; what is left over is harmless or refused.
"""

import math
from typing import Any

from serve_app.checkpoints.gguf_header import Field, GgufHeader
from serve_app.errors import ConfigError

_REQUIRED: Any = object()
_MOST = 2**28
"""More than any model has of anything. A damaged file could ask for all memory."""


class Metadata:
    """Reads keys, given without the prefix. refused: by whole key, why its value cannot be honoured."""

    def __init__(self, header: GgufHeader, source: object, architecture: str) -> None:
        """source: where the file is, for messages."""
        self.architecture = architecture
        self.refused: dict[str, str] = {}
        self.used_tensors: set[str] = set()
        self._fields = header.fields
        self._source = source
        self._used: set[str] = set()

    def left_over(self) -> list[str]:
        """Keys of the file that were not read, whole."""
        return [key for key in self._fields if key not in self._used]

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a key. An array of equal values is one value; another one is refused, and the value `default`.

        Raises ConfigError where there is no default for a key that the file lacks, or whose values differ.
        """
        field = self._use(key)
        if field is None:
            if default is _REQUIRED:
                raise self.error(f"its metadata lack {self.architecture}.{key}")
            return default
        value = field.value
        if not isinstance(value, list):
            return value
        if value and all(element == value[0] for element in value):
            return value[0]
        if default is _REQUIRED:
            raise self.error(f"{self.architecture}.{key} differs between layers, which is not computed")
        self.refuse(key, "it differs between layers")
        return default

    def whole(self, key: str) -> Any:
        """The value of a key, arrays as they are; None where the file lacks it."""
        field = self._use(key)
        return None if field is None else field.value

    def count(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive whole number below `_MOST`. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if type(value) is not int or not 0 < value < _MOST:
            raise self.error(
                f"{self.architecture}.{key} is {value!r}, and must be a positive whole number below {_MOST}"
            )
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value. Raises ConfigError for anything else."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string. Raises ConfigError for anything else."""
        value = self.value(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self.architecture}.{key} is {value!r}, and must be a string")
        return value

    def expect(self, key: str, computed: Any) -> None:
        """Refuse another value than what is computed anyway."""
        value = self.value(key, computed)
        if value != computed and not (isinstance(value, float) and math.isclose(value, computed, rel_tol=1e-5)):
            self.refuse(key, f"{value!r}, where the module computes with {computed!r}")

    def refuse(self, key: str, reason: str) -> None:
        """A key under the prefix."""
        self.refused[f"{self.architecture}.{key}"] = reason

    def use_tensor(self, name: str) -> None:
        """A tensor that is no parameter of the module."""
        self.used_tensors.add(name)

    def error(self, problem: str) -> ConfigError:
        """What to raise of the file."""
        return ConfigError(f"model: {self._source}: {problem}")

    def _use(self, key: str) -> Field | None:
        whole = f"{self.architecture}.{key}"
        self._used.add(whole)
        return self._fields.get(whole)
