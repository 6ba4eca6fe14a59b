"""Loads a model from its options: locates and reads the files, selects an executor, verifies it."""

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from serve_app.checkpoints.model_files import ModelFiles, check_model, locate_model
from serve_app.core.sampling_params import Pooling
from serve_app.errors import ConfigError
from serve_app.model.device_memory import refuse_beyond_memory
from serve_app.model.executor import Demand, UnsupportedModelError
from serve_app.model.executors import cpu, gpu
from serve_app.model.executors.mapping import Target
from serve_app.model.options import DTYPES, ModelOptions, Progress, resolve_dtype
from serve_app.model.paged_model import PagedModel
from serve_app.model.pooling import read_pooling
from serve_app.model.sources.blueprint import Blueprint, find_blueprint
from serve_app.model.sources.gguf_file import open_gguf
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint
from serve_app.model.sources.safetensors_files import open_safetensors
from serve_app.model.token_samplers import pick_sampler

logger = logging.getLogger(__name__)


def _no_report(stage: str, fraction: float) -> None:
    """Ignore progress."""


def load_model(options: ModelOptions, on_progress: Progress | None = None) -> PagedModel:
    """Load and prepare a model, calling `on_progress(stage, fraction)`.

    A GPU named in the options becomes the calling thread's current device. The thread that runs the
    model requires that. Raises ConfigError with a one-line cause for all problems with the options,
    the files or the model.
    """
    report = on_progress or _no_report
    device = pick_device(options.device)
    if device.type == "cuda" and device.index is not None:
        # Triton launches on the thread's current device, whatever device its tensors are on. Events
        # are recorded there too.
        torch.cuda.set_device(device)
    files = locate_model(options.model)
    check_model(files, max_model_len=None)
    pooling = read_pooling(files)
    mapped = _load_mapped(files, device, options, report, pooling)
    return mapped or _load_floats(files, device, options, report, pooling)


def from_module(module: Any, **options: Any) -> PagedModel:
    """Build a `PagedModel` from a copy of a transformers causal LM in memory. options: fields of
    `ModelOptions`.
    """
    return prepare(copy.deepcopy(module).eval(), type(module).__name__, ModelOptions(**options))


@torch.inference_mode()
def prepare(
    module: Any, name: str, options: ModelOptions, report: Progress = _no_report, pooling: Pooling = "last"
) -> PagedModel:
    """Take over a transformers causal LM in eval mode. Raises ConfigError if it is unsupported."""
    # These import transformers' modules. Most models on a CPU do not need them once they have a
    # blueprint.
    from serve_app.model.executors.selection import pick_executor
    from serve_app.model.sources.source_model import SourceModel

    source = SourceModel.take(module, name, options.max_model_len)
    executor = pick_executor(source, options, report)
    facts = source.facts.ending_with(options.end_ids)
    return PagedModel(facts, executor, pick_sampler(executor, facts), pooling)


def _load_floats(
    files: ModelFiles, device: torch.device, options: ModelOptions, report: Progress, pooling: Pooling | None
) -> PagedModel:
    """Load the model through transformers, which can read any model."""
    from serve_app.model.quiet import quiet
    from serve_app.model.sources.checkpoint import read_checkpoint

    with quiet():
        module = read_checkpoint(files, options, device, report, embeds=pooling is not None)
        needed = sum(parameter.nbytes for parameter in module.parameters())
        with refuse_beyond_memory(files.name, needed, device):
            return prepare(module.to(device), files.name, options, report, pooling or "last")


def _load_mapped(
    files: ModelFiles, device: torch.device, options: ModelOptions, report: Progress, pooling: Pooling | None
) -> PagedModel | None:
    """Load the weights directly from their files into the layout of the C or the Triton kernels,
    tensor by tensor.

    Returns None if the kernels are not wanted or cannot run the model; then transformers loads it
    as floats.
    """
    if files.path is None:
        return None
    try:
        target = _pick_target(files, device, options)
        return None if target is None else _map(files, target, options, report, pooling)
    except UnsupportedModelError as error:
        level = logging.WARNING if files.kind == "gguf" else logging.INFO
        logger.log(level, "model %s is converted to floats first: %s", files.name, error)
        return None


def _pick_target(files: ModelFiles, device: torch.device, options: ModelOptions) -> Target | None:
    """Return the kernels that the options call for, or None. Raises UnsupportedModelError."""
    dtype = resolve_dtype(options.dtype, _saved_dtype(files), device)
    if cpu.demand_on(device, dtype, options) is not Demand.NONE:
        return cpu.CpuTarget.of(dtype, options)
    if gpu.demand_on(device, options) is not Demand.NONE:
        return gpu.GpuTarget.of(device, dtype, options)
    return None


def _saved_dtype(files: ModelFiles) -> torch.dtype | None:
    """Return the dtype in a folder's config.json; None for GGUF, or if there is none."""
    try:
        config = json.loads(Path(files.source, "config.json").read_text()) if files.kind == "folder" else {}
        parts = config, config.get("text_config") or {}
        names = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
        return DTYPES.get(next(filter(None, names), ""))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None  # its next reader reports the error


@torch.inference_mode()
def _map(
    files: ModelFiles, target: Target, options: ModelOptions, report: Progress, pooling: Pooling | None
) -> PagedModel:
    """Map the files and build the model. Raises UnsupportedModelError and ConfigError."""
    reading = "reading gguf" if files.kind == "gguf" else "reading safetensors"
    report(reading, 0.0)
    checkpoint = open_checkpoint(files, options)
    report(reading, 1.0)
    choices = files.name, target.dtype, options.quantization, options.max_model_len, sorted(options.ignore_model_keys)

    def draw() -> Blueprint:
        # Imports transformers' modules.
        from serve_app.model.blueprint_builder import draw_blueprint

        drawn = draw_blueprint(files, checkpoint, target, options)
        report("verifying", 1.0)
        return drawn

    cache_dir = Path(options.cache_dir).expanduser()
    blueprint = find_blueprint(cache_dir, checkpoint.identity, target.build, choices, draw)
    if blueprint.names is not None:
        checkpoint = checkpoint.renamed(blueprint.names)
    executor = target.load(blueprint, checkpoint, report)
    # Replicas share blueprints, but not a GPU.
    facts = replace(blueprint.facts, device=target.device).ending_with(options.end_ids)
    return PagedModel(facts, executor, pick_sampler(executor, facts), pooling or "last")


def open_checkpoint(files: ModelFiles, options: ModelOptions) -> MappedCheckpoint:
    """Map a model's files, which must be local. Raises UnsupportedModelError and ConfigError."""
    assert files.path is not None  # of a hub id
    if files.kind == "folder":
        return open_safetensors(files.path)
    return open_gguf(files.path, Path(options.cache_dir).expanduser(), options.ignore_model_keys)


def pick_device(name: str) -> torch.device:
    """Return the device of `ModelOptions.device`. Raises ConfigError if it is unknown or absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: unknown name {name!r}; known: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not supported; known: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name!r} requested, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        )
    return device
