"""Reads a Serve config file as Serve and the application will, and looks whether it can work, before anything starts.

Decides what is refused and in which words. Does not deploy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.checkpoints.model_files import check_model, locate_model
from serve_app.environment import haproxy_enabled
from serve_app.errors import ConfigError
from serve_app.launch.tls import KeyPair
from serve_app.serving.auth import check_auth
from serve_app.serving.knobs import live_knobs, scheduler_knobs
from serve_app.settings import Settings, suggest
from serve_app.system.operator_files import load_yaml, read_text, typed_errors

_IMPORT_PATH = "serve_app.app:build"
ENGINE, INGRESS = "EngineReplica", "Ingress"
"""Our deployments' names."""


@dataclass(frozen=True)
class ConfigFile:
    """What the file says: where the server listens, its applications' names, and the settings of ours among them."""

    data: Mapping[str, Any]
    """The whole of it, as YAML has it."""
    schema: Any
    """The whole of it, a `ServeDeploySchema`."""
    key_pair: KeyPair | None
    """The files of the server's certificate; None for plain HTTP."""
    host: str
    port: int
    applications: tuple[str, ...]
    ours: Mapping[str, Settings]

    @property
    def url(self) -> str:
        """How to reach it from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{'http' if self.key_pair is None else 'https'}://{host}:{self.port}"


def read_config(path: Path) -> ConfigFile:
    """Raises `ConfigError` in one line, whatever is wrong with the file or the files that it names."""
    with typed_errors("cannot be used: "):
        return _read_config(path)


def _read_config(path: Path) -> ConfigFile:
    from pydantic import ValidationError
    from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

    data = load_yaml(read_text(path))
    try:
        schema = ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    _check_keys("", data, ServeDeploySchema)
    _check_keys("http_options.", data.get("http_options") or {}, HTTPOptionsSchema)
    applications, host = schema.applications, schema.http_options.host
    if not applications:
        raise ConfigError("applications: must name at least one")
    return ConfigFile(
        data,
        schema,
        _key_pair(schema.http_options),
        host,
        schema.http_options.port,
        tuple(application.name for application in applications),
        {item.name: _check_application(item, host) for item in applications if item.import_path == _IMPORT_PATH},
    )


def write_for_ray(config: ConfigFile, copy: Path) -> None:
    """What was checked, however the file changes meanwhile.

    Without TLS where HAProxy ends it: HAProxy would not understand an ingress that speaks it too.
    """
    options = dict(config.data.get("http_options") or {})
    if haproxy_enabled():
        for key in ("ssl_certfile", "ssl_keyfile"):
            options.pop(key, None)
    copy.write_text(yaml.safe_dump({**config.data, "http_options": options}))


def _key_pair(options: Any) -> KeyPair | None:
    """Of an `HTTPOptionsSchema`."""
    if haproxy_enabled():
        for key in ("ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(options, key) is not None:
                raise ConfigError(f"http_options.{key}: only Ray's default path has it, where HAProxy does not end TLS")
    return None if options.ssl_certfile is None else KeyPair(Path(options.ssl_certfile), Path(options.ssl_keyfile))


def _check_application(application: Any, host: str) -> Settings:
    """The settings in a `ServeApplicationSchema`, whose engine's `user_config` is looked at too."""
    settings = Settings.model_validate(application.args)
    check_model(locate_model(settings.model), settings.engine.max_model_len)
    _check_device(settings)
    scheduler_knobs(settings)
    check_auth(settings.ingress, host)
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
