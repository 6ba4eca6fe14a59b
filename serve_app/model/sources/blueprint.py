"""Everything besides weights that an executor is built from, cached on disk between starts.

`blueprint_builder` derives it from transformers' modules, whose imports take 1 s and 100 MiB per
process. It is valid as long as model, options, libraries and code are unchanged, so later starts
skip those imports.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.model.facts import ModelFacts
from serve_app.model.records import DecoderRecord
from serve_app.system.code_digest import digest_code

_LIBRARIES = "torch", "transformers"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A verified model that the kernels can run.

    parameters: the tensors that a checkpoint holds, by their names in transformers' module. They
    have shapes but no values. names: the module's name of each of the files' tensors; None if they
    are the same.
    """

    facts: ModelFacts
    record: DecoderRecord
    parameters: Mapping[str, Tensor]
    names: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> "Blueprint":
        """Read a blueprint. Raises any exception for a damaged file."""
        with path.open("rb") as file:
            reader = _Unpickler(file)
            facts, record, names = reader.load()
        return cls(facts, record, reader.parameters, names)

    def write(self, path: Path) -> None:
        """Write the blueprint. Raises OSError."""
        with path.open("wb") as file:
            _Pickler(file, self.parameters).dump((self.facts, self.record, self.names))


def find_blueprint(
    cache_dir: Path, identity: tuple[str, str], library: str, choices: Sequence[object], draw: Callable[[], Blueprint]
) -> Blueprint:
    """Return the cached blueprint, or the result of `draw`. Failure to write to the disk is not an
    error.

    identity: see `Parameters`; library: see `Kernels`; choices: the options that affect the
    blueprint.
    """
    libraries = [library, *map(version, _LIBRARIES)]
    key = Key(Path(identity[0]), str(choices), f"{identity[1]} {libraries} {digest_code()}")
    try:
        return DiskCache(cache_dir, "blueprints").get(key, lambda path: draw().write(path), Blueprint.read)
    except OSError:
        return draw()


class _Pickler(pickle.Pickler):
    """Writes names and shapes instead of parameters."""

    def __init__(self, file: IO[bytes], parameters: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._names = {id(parameter): (name, tuple(parameter.shape)) for name, parameter in parameters.items()}

    def persistent_id(self, obj: Any) -> tuple[str, tuple[int, ...]] | None:
        return self._names.get(id(obj)) if isinstance(obj, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.parameters: dict[str, Tensor] = {}

    def persistent_load(self, pid: tuple[str, tuple[int, ...]]) -> Tensor:
        """Return the same tensor for the same name: packing depends on whether two parameters are
        identical.
        """
        name, shape = pid
        if name not in self.parameters:
            self.parameters[name] = torch.empty(shape, device="meta")
        return self.parameters[name]
