"""`serve-app serve`: start the server. The work is the launcher's."""

from pathlib import Path
from typing import Annotated, Any

import typer

_OPTIONS = {
    "replicas": "num_replicas",
    "max_model_len": "engine.max_model_len",
    "dtype": "dtype",
    "gpu_memory_utilization": "engine.memory_fraction",
}
"""The setting of each option."""


def serve(
    target: Annotated[
        str | None,
        typer.Argument(help="A model (folder, .gguf file, hub id) or a config file (.yaml). Default: a small model."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A config file, for a model as target.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Number of engine replicas.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Names in the API, separated by commas.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SERVE_APP_API_KEY", metavar="KEY", help="The key that clients must send.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(metavar="FRACTION", help="Part of the free memory for the KV cache.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of docs/settings.md.")
    ] = None,
) -> None:
    """Serve a model on this machine, in the foreground. Without options: on loopback, port 8000.

    serve-app serve Qwen/Qwen3-0.6B --port 9000 --set engine.kv_cache_gib=4
    """
    from serve_app.errors import ConfigError
    from serve_app.launch.config_source import ConfigSource, parse_setting

    given: dict[str, Any] = {"replicas": replicas, "max_model_len": max_model_len, "dtype": dtype}
    given["gpu_memory_utilization"] = gpu_memory_utilization
    settings: dict[str, Any] = {_OPTIONS[name]: value for name, value in given.items() if value is not None}
    if served_model_name is not None:
        settings["served_model_name"] = served_model_name.split(",")
    http = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    try:
        settings.update(parse_setting(text) for text in set_ or ())
        source = ConfigSource.of(target, config, http=http, settings=settings, api_key=api_key)
    except ConfigError as error:
        typer.echo(f"serve-app: {error}", err=True)
        raise typer.Exit(2) from None
    from serve_app.launch.launcher import launch

    raise typer.Exit(launch(source))
