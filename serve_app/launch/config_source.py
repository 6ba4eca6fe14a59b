"""What `serve-app serve` starts: a Serve config file, or a model with the default configuration.
Command-line options override its settings."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError
from serve_app.system.operator_files import load_yaml, read_text
from serve_app.tenants.keys import MIN_KEY_CHARACTERS, hash_key

IMPORT_PATH = "serve_app.app:build"
_CONFIG_SUFFIXES = (".yaml", ".yml")
_DEFAULT: Mapping[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    "applications": [{"name": "serve_app", "route_prefix": "/", "import_path": IMPORT_PATH, "args": {}}],
}
_DEFAULT_MODEL: Mapping[str, Any] = {"engine": {"kv_cache_gib": 1.0}, "ingress": {"tools": "hermes"}}
"""Settings of the default model: it is small, and its template does not define a tool format."""


@dataclass(frozen=True)
class ConfigSource:
    """What to start. `read` returns it as the content of a Serve config file.

    model: the setting `model`; None: the file's, or the default model. file: a config file; None:
    the default configuration. http: keys of `http_options`. settings: values by dotted keys of the
    application's `args`. api_key: the only key that the server accepts; it is an admin's.
    """

    model: str | None = None
    file: Path | None = None
    http: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    @classmethod
    def of(cls, name: str | None, file: Path | None, **options: Any) -> "ConfigSource":
        """Return the source for a command line. `name`: a config file if it ends in .yaml or .yml,
        else a model. Raises `ConfigError`."""
        if name is None or not name.endswith(_CONFIG_SUFFIXES):
            return cls(name, file, **options)
        if file is not None:
            raise ConfigError(f"{name} and --config {file} are both config files; name one of them")
        return cls(None, Path(name), **options)

    def __str__(self) -> str:
        """Return the name for messages."""
        return str(self.file or self.model or "the default model")

    def read(self, scratch: Path) -> Any:
        """Return the content of the config file with the options applied. `scratch`: folder for the
        keys file of `api_key`. Raises `ConfigError`, and `OSError` if `scratch` cannot be
        written."""
        data: Any = copy.deepcopy(dict(_DEFAULT)) if self.file is None else load_yaml(read_text(self.file))
        changes = self._changes(scratch)
        if not isinstance(data, dict):
            return data  # its reader refuses it
        if self.http:
            data["http_options"] = {**_section(data, "http_options"), **self.http}
        if changes:
            _merge(_args_of_one(data), changes)
        return data

    def _changes(self, scratch: Path) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.file is None and self.model in (None, "default"):
            _merge(changes, _DEFAULT_MODEL)
        if self.model is not None:
            changes["model"] = self.model
        for key, value in self.settings.items():
            *sections, name = key.split(".")
            for section in reversed(sections):
                name, value = section, {name: value}
            _merge(changes, {name: value})
        if self.api_key is not None:
            _merge(changes, {"ingress": {"keys_file": str(_write_keys(scratch, self.api_key))}})
        return changes


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of `KEY=VALUE`. The value is read as YAML. Raises
    `ConfigError`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set {text}: must be KEY=VALUE, for example engine.kv_cache_gib=4")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}: its value is not valid YAML") from None


def _args_of_one(data: dict[str, Any]) -> dict[str, Any]:
    """Return the `args` of the config's only application. Raises `ConfigError` unless there is
    exactly one."""
    applications = data.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError("options of the command line need a config file with exactly one application")
    args = applications[0]["args"] = _section(applications[0], "args")
    return args


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a mapping of the config, empty if it is missing. Raises `ConfigError` for another
    type."""
    section = data.get(key) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{key}: must be a mapping, got {type(section).__name__}")
    return section


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping):
            inner = into[key] if isinstance(into.get(key), dict) else {}
            into[key] = {**inner}
            _merge(into[key], value)
        else:
            into[key] = value


def _write_keys(scratch: Path, key: str) -> Path:
    """Write a keys file that only this user can read."""
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(f"--api-key: must have at least {MIN_KEY_CHARACTERS} characters, got {len(key)}")
    path = scratch / "keys.yaml"
    path.touch(0o600)
    path.write_text(yaml.safe_dump({"command-line": {"sha256": hash_key(key), "admin": True}}))
    return path
