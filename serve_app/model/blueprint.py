"""What an executor is built from beside the weights, kept on disk from one start to the next.

How a model computes is found out from transformers' modules (`drawing`), whose imports take a process a second and
100 MiB. The answer is the same as long as model, options, libraries and code are, so later starts do without them.
"""

import hashlib
import logging
import pickle
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from serve_app.code_digest import digest_code
from serve_app.model.facts import ModelFacts
from serve_app.model.llama import Llama

logger = logging.getLogger(__name__)

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
    def read(cls, path: Path) -> "Blueprint | None":
        """None where there is none that can be read. The folder is trusted, as that of the compiled kernels is."""
        try:
            with path.open("rb") as file:
                reader = _Unpickler(file)
                facts, llama = reader.load()
        except OSError:
            return None
        except Exception as error:  # a damaged file raises whatever its bytes provoke
            logger.warning("%s is damaged and will be rebuilt: %r", path, error)
            return None
        return cls(facts, llama, reader.parameters)

    def write(self, path: Path) -> None:
        """In place of others of the same source and choices. A disk that does not take it is no error."""
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="tmp-") as scratch:
                unfinished = Path(scratch) / path.name
                with unfinished.open("wb") as file:
                    _Pickler(file, self.parameters).dump((self.facts, self.llama))
                unfinished.rename(path)
            for other in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
                if other != path:
                    other.unlink(missing_ok=True)


def blueprint_path(cache_dir: Path, identity: tuple[str, str], library: str, *choices: object) -> Path:
    """Where it is kept. identity: see `Parameters`; library: see `Kernels`; choices: of who starts the model."""
    same = hashlib.sha256(f"{identity[0]} {choices}".encode()).hexdigest()
    libraries = [library, *map(version, _LIBRARIES)]
    exact = hashlib.sha256(f"{identity} {choices} {libraries} {digest_code()}".encode()).hexdigest()
    return cache_dir / "blueprints" / f"{same[:16]}-{exact[:32]}"


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
