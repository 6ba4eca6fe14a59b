"""Reads a model's weights into transformers' module, and refuses everything that is not exactly a
causal LM.

Decides the dtype of the weights, and where weights converted from GGUF are kept. Does not decide
whether the model can be served.
"""

import contextlib
import copy
import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM  # of GGUF files

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.checkpoints.model_files import ModelFiles
from serve_app.errors import ConfigError, one_line
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.options import ModelOptions, Progress, resolve_dtype
from serve_app.model.sources.config_keys import read_config
from serve_app.model.sources.gguf_file import describe, known_tensors, make_config, read_floats
from serve_app.model.sources.skeleton import empty_module, empty_text_module
from serve_app.model.sources.tensor_names import is_left_out
from serve_app.model.sources.wrappers import auto_class, keep_text

logger = logging.getLogger(__name__)


def read_checkpoint(
    files: ModelFiles, options: ModelOptions, device: torch.device, report: Progress, *, embeds: bool = False
) -> Any:
    """Return the module with its weights, on the CPU and in eval mode.

    device: the device that will run the model; it decides the dtype for "auto". embeds: the
    checkpoint is for embeddings and may lack a head. Raises ConfigError.
    """
    if files.gguf_file is not None:
        return _load_gguf(Path(files.source, files.gguf_file), options, device, report)
    commit = files.commit or "main"
    config = read_config(files.source, options.ignore_model_keys, commit)
    return _load_pretrained(files.source, config, options.dtype, device, report, commit, embeds=embeds)


def _load_pretrained(
    source: str,
    config: Any,
    dtype: str,
    device: torch.device,
    report: Progress,
    commit: str = "main",
    *,
    embeds: bool = False,
) -> Any:
    report("loading weights", 0.0)
    left_out = _parts_left_out(source, config)
    try:
        module, info = auto_class(config).from_pretrained(
            source,
            revision=commit,
            config=config,
            dtype=resolve_dtype(dtype, config.dtype, device),
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, then refused below by name
        )
    except Exception as error:  # transformers' validators and readers may raise anything
        raise ConfigError(f"model: cannot load {source}: {one_line(error)}") from error
    keep_text(module)
    info = {kind: [key for key in keys if not is_left_out(str(key), left_out, module)] for kind, keys in info.items()}
    if embeds and {*info["missing_keys"]} == {"lm_head.weight"}:
        logger.warning("model %s has no head: its embeddings are valid, its generated text is meaningless", source)
        module.lm_head.weight = module.get_input_embeddings().weight
        info["missing_keys"] = []
    _check_weights(source, info)
    report("loading weights", 1.0)
    return module.eval()


def _parts_left_out(source: str, config: Any) -> frozenset[str]:
    """Return the names of a wrapper's parts that are not served. Raises ConfigError without reading
    the weights if its text model is not known.
    """
    try:
        auto_class(config)
        return empty_text_module(config)[1] if config.get_text_config() is not config else frozenset()
    except UnsupportedModelError as error:
        raise ConfigError(f"model: {source}: {config.model_type} cannot be served: {error}") from error


def _load_gguf(path: Path, options: ModelOptions, device: torch.device, report: Progress) -> Any:
    """Load a GGUF file's weights, which are dequantized once and then read from the cache.

    The conversion takes seconds, so its result is cached as float32 safetensors, bit for bit. The
    key is a hash of the file's content and of the configuration read from it.
    """
    report("reading gguf", 0.0)
    header, described = describe(path, options.ignore_model_keys)
    config = make_config(path, described)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(described.values, sort_keys=True).encode())

    def convert(folder: Path) -> None:
        report("converting gguf", 0.0)
        try:
            module = empty_module(config)
            names = known_tensors(path, header, described, module)
        except UnsupportedModelError as error:
            raise ConfigError(f"model: cannot read {path}: {error}") from error
        try:
            weights = read_floats(header, names, module)
        except UnsupportedModelError:  # transformers knows more types, and how experts are merged
            _convert_gguf(path, config, folder)
        else:
            _save_weights(config, weights, module, folder)
        report("converting gguf", 1.0)

    key = Key(path.resolve(), "", f"{digest.hexdigest()} transformers {transformers.__version__}")
    kept = DiskCache(Path(options.cache_dir), "gguf-floats").get_or_temporary(key, convert, _whole)
    return _load_pretrained(str(kept), config, options.dtype, device, report)


def _whole(folder: Path) -> Path:
    """Return the folder. Raises any exception for damaged files in it."""
    json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt"):  # checks the size against the header
        return folder


def _convert_gguf(path: Path, config: Any, target: Path) -> None:
    try:
        # The converter's progress bar ignores all switches of transformers.
        with contextlib.redirect_stderr(io.StringIO()):
            module, info = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # the reader may raise anything for a damaged file
        raise ConfigError(f"model: cannot read {path}: {one_line(error)}") from error
    _check_weights(str(path), info)
    _save(module, target)


def _save(module: Any, folder: Path) -> None:
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        unique.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    _save_weights(module.config, dict(unique.values()), module, folder)


def _save_weights(config: Any, weights: dict[str, torch.Tensor], module: Any, folder: Path) -> None:
    """Write a folder that transformers reads. module: may be empty."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)


def _check_weights(source: str, info: Any) -> None:
    """Raise ConfigError for bad weights. transformers only warns about them, and leaves random
    weights in the model.
    """
    for kind, text in (
        ("missing_keys", "weights are missing"),
        ("mismatched_keys", "weights have the wrong shape"),
        ("unexpected_keys", "weights do not belong to any part of the model"),
        ("error_msgs", "weights could not be read"),
    ):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ConfigError(f"model: {source}: {text}: {', '.join(keys[:3])}{more}")
