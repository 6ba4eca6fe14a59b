"""Reads and validates a Serve config file before anything starts.

Parses it as Serve and the application will. Defines the error messages. Does not deploy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.checkpoints.model_files import check_model, locate_model, pin_model
from serve_app.environment import haproxy_enabled
from serve_app.errors import ConfigError
from serve_app.launch.config_source import IMPORT_PATH, ConfigSource
from serve_app.launch.tls import KeyPair
from serve_app.serving.auth import check_auth
from serve_app.serving.knobs import live_knobs, scheduler_knobs
from serve_app.settings import Settings, suggest
from serve_app.system.operator_files import typed_errors

_MAX_HOST = 253
ENGINE, INGRESS = "EngineReplica", "Ingress"
"""Names of our deployments."""


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a config file.

    `applications`: all names; `ours`: settings of our applications.
    """

    data: Mapping[str, Any]
    """The whole file, parsed from YAML."""
    schema: Any
    """The whole file as a `ServeDeploySchema`."""
    key_pair: KeyPair | None
    """The server's certificate and key files; None for plain HTTP."""
    host: str
    port: int
    applications: tuple[str, ...]
    ours: Mapping[str, Settings]

    @property
    def url(self) -> str:
        """URL of the server on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{'http' if self.key_pair is None else 'https'}://{host}:{self.port}"


def read_config(source: ConfigSource, scratch: Path) -> ConfigFile:
    """Read and validate a config file. scratch: see `ConfigSource.read`.

    Raises `ConfigError` with one line for any error in the file or in the files that it names.
    """
    with typed_errors("cannot be used: "):
        return _read_config(source.read(scratch))


def _read_config(data: Any) -> ConfigFile:
    from pydantic import ValidationError
    from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

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
    if len(host) > _MAX_HOST:
        raise ConfigError(f"http_options.host: has {len(host)} characters, but a name has at most {_MAX_HOST}")
    return ConfigFile(
        data,
        schema,
        _key_pair(schema.http_options),
        host,
        schema.http_options.port,
        tuple(application.name for application in applications),
        {item.name: _check_application(item, host) for item in applications if item.import_path == IMPORT_PATH},
    )


def write_for_ray(config: ConfigFile, copy: Path) -> None:
    """Write the validated config for Ray, so that later changes of the file have no effect.

    Omits TLS if HAProxy terminates it: HAProxy expects plain HTTP from the ingress.
    """
    options = dict(config.data.get("http_options") or {})
    if haproxy_enabled():
        for key in ("ssl_certfile", "ssl_keyfile"):
            options.pop(key, None)
    copy.write_text(yaml.safe_dump({**config.data, "http_options": options}))


def _key_pair(options: Any) -> KeyPair | None:
    """Return the key pair in an `HTTPOptionsSchema`."""
    if haproxy_enabled():
        for key in ("ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(options, key) is not None:
                raise ConfigError(f"http_options.{key}: not supported on the fast path, where HAProxy terminates TLS")
    return None if options.ssl_certfile is None else KeyPair(Path(options.ssl_certfile), Path(options.ssl_keyfile))


def _check_application(application: Any, host: str) -> Settings:
    """Return a `ServeApplicationSchema`'s settings. Also validates the engine's `user_config`."""
    settings = Settings.model_validate(application.args)
    context = settings.engine.max_model_len
    check_model(locate_model(settings.model), context if isinstance(context, int) else None)
    pin_model(settings.model)  # before Ray starts: the hub may not know the model
    _check_device(settings)
    scheduler_knobs(settings)
    check_auth(settings.ingress, host)
    for deployment in application.deployments:
        if deployment.name == ENGINE and isinstance(deployment.user_config, Mapping):
            live_knobs(settings, deployment.user_config)
    return settings


def _check_device(settings: Settings) -> None:
    """Refuse combinations that no replica on this device could load.

    An update with one of them would end the old replicas first.
    """
    if settings.device == "cpu" and "fp8" in (settings.quantization, settings.engine.kv_cache_dtype):
        key = "quantization" if settings.quantization == "fp8" else "engine.kv_cache_dtype"
        raise ConfigError(f"setting `{key}`: fp8 needs a GPU, and `device` is cpu")
    if settings.device == "cuda" and settings.quantization == "int8":
        raise ConfigError("setting `quantization`: int8 is for CPUs, and `device` is cuda")


def _check_keys(prefix: str, data: Mapping[str, Any], schema: Any) -> None:
    """Raise `ConfigError` for keys that `schema` does not have; Serve would ignore them."""
    for key in data:
        if key not in schema.model_fields:
            raise ConfigError(f"unknown key `{prefix}{key}` {suggest(key, list(schema.model_fields))}")
