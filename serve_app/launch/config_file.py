"""Reads a Serve config file as Serve and the application will, and looks whether it can work, before anything starts.

Decides what is refused and in which words. Does not deploy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError
from serve_app.model_files import check_model, locate_model
from serve_app.serving.doors import check_doors
from serve_app.serving.knobs import live_knobs, scheduler_knobs
from serve_app.settings import Settings, suggest

_IMPORT_PATH = "serve_app.app:build"
ENGINE, INGRESS = "EngineReplica", "Ingress"
"""Our deployments' names."""


@dataclass(frozen=True)
class ConfigFile:
    """What the file says: where the server listens, its applications' names, and the settings of ours among them."""

    schema: Any
    """The whole of it, a `ServeDeploySchema`."""
    host: str
    port: int
    applications: tuple[str, ...]
    ours: Mapping[str, Settings]

    @property
    def url(self) -> str:
        """How to reach it from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def read_config(path: Path) -> ConfigFile:
    """Raises `ConfigError` in one line."""
    from pydantic import ValidationError
    from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

    try:
        data = yaml.safe_load(path.read_text())
        schema = ServeDeploySchema.model_validate(data)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    _check_keys("", data, ServeDeploySchema)
    _check_keys("http_options.", data.get("http_options") or {}, HTTPOptionsSchema)
    applications, host = schema.applications, schema.http_options.host
    return ConfigFile(
        schema,
        host,
        schema.http_options.port,
        tuple(application.name for application in applications),
        {item.name: _check_application(item, host) for item in applications if item.import_path == _IMPORT_PATH},
    )


def _check_application(application: Any, host: str) -> Settings:
    """The settings in a `ServeApplicationSchema`, whose engine's `user_config` is looked at too."""
    settings = Settings.model_validate(application.args)
    check_model(locate_model(settings.model), settings.engine.max_model_len)
    _check_device(settings)
    scheduler_knobs(settings.engine)
    check_doors(settings.ingress, host)
    for deployment in application.deployments:
        if deployment.name == ENGINE and isinstance(deployment.user_config, Mapping):
            live_knobs(settings, deployment.user_config)
    return settings


def _check_device(settings: Settings) -> None:
    """What no replica on such a device could load. An update that names it would end the old replicas first."""
    if settings.device == "cpu" and "fp8" in (settings.quantization, settings.engine.kv_cache_dtype):
        key = "quantization" if settings.quantization == "fp8" else "engine.kv_cache_dtype"
        raise ConfigError(f"setting `{key}`: fp8 needs a GPU, and `device` is cpu")
    if settings.device == "cuda" and settings.quantization == "int8":
        raise ConfigError("setting `quantization`: int8 is for CPUs, and `device` is cuda")


def _check_keys(prefix: str, data: Mapping[str, Any], schema: Any) -> None:
    """Refuse keys that `schema` does not have; Serve would ignore them."""
    for key in data:
        if key not in schema.model_fields:
            raise ConfigError(f"unknown key `{prefix}{key}` {suggest(key, list(schema.model_fields))}")
