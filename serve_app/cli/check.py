"""`serve-app check`: whether a model can be served here, and how, without loading its weights."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from serve_app.core.autosize import MAX_SLOTS, choose_slots
from serve_app.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Report:
    """What the command prints, in its order."""

    model: str
    family: str
    path: str
    format: str
    weights: str
    kv_cache: str
    context: str
    slots: str


def check(
    model: Annotated[str, typer.Argument(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="As the setting.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Report a model's path, format, memory, context and slots on this machine, without loading its
    weights. Exit status 2 if it cannot be served."""
    try:
        report = asdict(_report(model, max_model_len))
    except ConfigError as error:
        typer.echo(json.dumps({"model": model, "path": "refused", "reason": str(error)}) if as_json else str(error))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name, value in report.items():
        typer.echo(f"{name.replace('_', ' '):<9} {value}")


def _report(model: str, max_model_len: int | None) -> Report:
    """Raises ConfigError if the model cannot be served, or if its memory is not available."""
    from serve_app.model.inspection import inspect_model
    from serve_app.model.options import ModelOptions
    from serve_app.model.profiling.memory import (
        available_memory,
        fitting_blocks,
        fitting_context,
        pool_budget,
    )
    from serve_app.settings import Settings

    settings = Settings(model=model)
    options = ModelOptions(model=model, max_model_len=max_model_len, quantization=settings.quantization)
    found = inspect_model(options)
    left = available_memory(found.device) - found.weight_bytes
    if left <= 0:
        raise ConfigError(
            f"model: its weights need about {found.weight_bytes / _GIB:.2f} GiB, and {found.device} has "
            f"{(left + found.weight_bytes) / _GIB:.2f} GiB available"
        )
    budget = pool_budget(left, found.device, settings.engine.memory_fraction)
    blocks = fitting_blocks(budget, found.kv_bytes_per_token * found.block_size)
    tokens = (blocks - 1) * found.block_size
    context = fitting_context(blocks, found.block_size, found.max_model_len)
    if context == 0 or (max_model_len is not None and context < max_model_len):
        raise ConfigError(
            f"max_model_len: {found.max_model_len} tokens do not fit the KV pool, which holds {tokens}; lower it"
        )
    shown = f"{context:,}" if context == found.max_model_len else f"{context:,} of {found.max_model_len:,}"
    fast = "the GPU kernels" if found.device.type == "cuda" else "the CPU kernels"
    return Report(
        model=str(found.files.path or found.files.source),
        family=f"{found.model_type} ({found.name})",
        path=f"fast ({fast})" if found.fast else f"modules ({found.reason})",
        format=f"{'GGUF' if found.files.kind == 'gguf' else 'safetensors'}: {found.stored}",
        weights=f"about {found.weight_bytes / _GIB:.2f} GiB on {found.device}",
        kv_cache=f"{found.kv_bytes_per_token:,} bytes per token; {tokens:,} tokens fit",
        context=f"{shown} tokens; {tokens // context:,} requests of that length fit",
        slots=f"up to {choose_slots(MAX_SLOTS, tokens, None).number}",
    )
