"""Builds the blueprint of a checkpoint's model from transformers' modules, and verifies the
kernels.

Separate from `blueprint` because importing transformers' modules is slow, and most starts find a
cached blueprint.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import AutoConfig, GenerationConfig

from serve_app.checkpoints.model_files import ModelFiles
from serve_app.errors import one_line
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.executors.mapping import Target
from serve_app.model.families import recognise
from serve_app.model.options import ModelOptions
from serve_app.model.quiet import quiet
from serve_app.model.rope import fix_frequencies
from serve_app.model.sources.blueprint import Blueprint
from serve_app.model.sources.config_keys import check_quantization, read_config
from serve_app.model.sources.mapped_checkpoint import GENERATION_CONFIG, MappedCheckpoint, stored_tensors
from serve_app.model.sources.safetensors_files import check_complete
from serve_app.model.sources.skeleton import empty_text_module, small_copy, whole_windows
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.sources.tensor_names import module_names
from serve_app.model.sources.wrappers import layers_of


def draw_blueprint(files: ModelFiles, checkpoint: MappedCheckpoint, target: Target, options: ModelOptions) -> Blueprint:
    """Build the blueprint. Raises ConfigError, and UnsupportedModelError if the kernels cannot run
    the model.
    """
    with quiet():
        return _draw(files, checkpoint, target, options)


def _draw(files: ModelFiles, checkpoint: MappedCheckpoint, target: Target, options: ModelOptions) -> Blueprint:
    config, generation_config = _configs(files, checkpoint, options.ignore_model_keys)
    module, left_out = empty_text_module(config)
    if generation_config is not None:
        module.generation_config = generation_config
    names = None
    if files.kind == "folder":
        names = module_names(checkpoint.tensors, module, left_out)
        check_complete(checkpoint.renamed(names), module)
    narrow = small_copy(config, target.device, target.reference_dtype)
    small = SourceModel.take(narrow, files.name, options.max_model_len)
    target.verify(replace(small, facts=replace(small.facts, dtype=target.dtype)))
    layers = whole_windows(small.facts.layers, config)
    facts = replace(small.facts.of_whole(module), dtype=target.dtype, layers=layers)
    fix_frequencies(module, facts.max_model_len)
    record = recognise(module, layers_of(module), facts.layers, facts.max_model_len)
    return Blueprint(facts, record, stored_tensors(module), names)


def _configs(files: ModelFiles, checkpoint: MappedCheckpoint, ignored: Collection[str]) -> tuple[Any, Any]:
    folder = checkpoint.config_folder
    # A GGUF file's metadata was checked when its configuration was written.
    of_folder = read_config(str(folder), ignored) if files.kind == "folder" else None
    try:
        config = of_folder or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        own = (folder / GENERATION_CONFIG).is_file()
        generation_config = GenerationConfig.from_pretrained(folder) if own else None
    except Exception as error:  # transformers' validators may raise anything
        raise UnsupportedModelError(f"{folder} cannot be used unchanged: {one_line(error)}") from error
    check_quantization(config)
    return config, generation_config
