"""What an executor is built from beside the weights, kept on disk from one start to the next.

How a model computes is found out from transformers' modules (`blueprint_builder`), whose imports take a second and
100 MiB in each process. The answer is the same as long as model, options, libraries and code are, so later starts do
without them.
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
from serve_app.model.llama import Llama
from serve_app.system.code_digest import digest_code

_LIBRARIES = "torch", "transformers"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model that the CPU kernels run, and that was verified.

    parameters: the tensors of `llama` that are weights, by their names in transformers' module. They have shapes, but
    no numbers.
    """

    facts: ModelFacts
    llama: Llama
    parameters: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> "Blueprint":
        """Raises whatever a damaged file provokes."""
        with path.open("rb") as file:
            reader = _Unpickler(file)
            facts, llama = reader.load()
        return cls(facts, llama, reader.parameters)

    def write(self, path: Path) -> None:
        """Raises OSError."""
        with path.open("wb") as file:
            _Pickler(file, self.parameters).dump((self.facts, self.llama))


def find_blueprint(
    cache_dir: Path, identity: tuple[str, str], library: str, choices: Sequence[object], draw: Callable[[], Blueprint]
) -> Blueprint:
    """The one that is kept, or what `draw` makes; a disk that takes none is no error.

    identity: see `Parameters`; library: see `Kernels`; choices: of who starts the model.
    """
    libraries = [library, *map(version, _LIBRARIES)]
    key = Key(Path(identity[0]), str(choices), f"{identity[1]} {libraries} {digest_code()}")
    try:
        return DiskCache(cache_dir, "blueprints").get(key, lambda path: draw().write(path), Blueprint.read)
    except OSError:
        return draw()


class _Pickler(pickle.Pickler):
    """Writes names and shapes in place of parameters."""

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
        """The same tensor for the same name: whether two are one decides how a model is packed."""
        name, shape = pid
        if name not in self.parameters:
            self.parameters[name] = torch.empty(shape, device="meta")
        return self.parameters[name]
