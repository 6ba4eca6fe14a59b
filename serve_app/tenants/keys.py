"""API keys: creation, hashing, lookup.

Only hashes are stored; 256 random bits need no slow hash.
"""

import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.errors import AuthenticationError, ConfigError, RequestError, UnavailableError
from serve_app.system.operator_files import BoundedLoader, load_yaml
from serve_app.tenants.tenant import NAME, Tenant

_PREFIX = "sk-serve-"
_RETRY_AFTER_S = 2.0
_HASH = re.compile(r"[0-9a-f]{64}")


MIN_KEY_CHARACTERS = 16
"""Fewest characters of a key that a user chooses."""


def new_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the stored form of a key: its SHA-256 in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def check_name(name: str) -> None:
    """Raise `ConfigError` unless `name` is valid for a key."""
    if "\n" in name or not re.match(NAME, name):
        raise ConfigError(
            f"{name[:100]!r} is not a valid name: use at most 64 letters, digits, '.', '_' and '-', and begin with a "
            "letter or digit"
        )


class KeyRing:
    """The tenants of one keys file, by the hashes of their keys."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = dict(tenants)

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants, in the order of the file."""
        return list(self._tenants.values())

    def find(self, key: str, now: datetime) -> Tenant:
        """Return the tenant of `key` at `now`. Raises `AuthenticationError`.

        The lookup is by hash, so its time reveals nothing about similar keys.
        """
        tenant = self._tenants.get(hash_key(key))
        if tenant is None:
            raise AuthenticationError("unknown API key")
        if tenant.expires is not None and tenant.expires <= now:
            raise AuthenticationError(f"the API key expired at {tenant.expires:%Y-%m-%d %H:%M} UTC")
        return tenant

    def is_admin(self, key: str, now: datetime) -> bool:
        """Whether `key` is a valid admin key at `now`."""
        try:
            return self.find(key, now).admin
        except RequestError:
            return False


class UnknownKeys(KeyRing):
    """A key ring used until the keys file can be read for the first time. It cannot check keys."""

    def __init__(self) -> None:
        super().__init__({})

    def find(self, key: str, now: datetime) -> Tenant:
        """Raise `UnavailableError`."""
        raise self.error()

    def error(self) -> UnavailableError:
        """Return the error for a request whose key cannot be checked."""
        return UnavailableError(
            "API keys cannot be checked: `ingress.keys_file` is invalid; see the server's log",
            code="keys_file_invalid",
            retry_after_s=_RETRY_AFTER_S,
        )


def parse_keys(text: str) -> KeyRing:
    """Parse the text of a keys file (names with their fields). Raises `ConfigError` in one line.

    Errors never contain a value, since it could be a key instead of its hash.
    """
    data = load_yaml(text, _UniqueKeys)
    if not text.strip():
        raise ConfigError("is empty; write `{}` for no keys")
    if not isinstance(data or {}, dict):
        raise ConfigError("must map names of keys to their fields")
    ring: dict[str, Tenant] = {}
    for name, fields in (data or {}).items():
        digest, tenant = _parse_entry(str(name), fields)
        if digest in ring:
            raise ConfigError(f"{name}: same key as {ring[digest].name}")
        ring[digest] = tenant
    return KeyRing(ring)


def check_limits(ring: KeyRing, *, has_ledger: bool) -> None:
    """Raise `ConfigError` if a key has a limit per day but there is no ledger to keep it over a
    restart."""
    for tenant in ring.tenants:
        if tenant.tokens_per_day is not None and not has_ledger:
            raise ConfigError(f"{tenant.name}: `tokens_per_day` needs `ingress.ledger_folder`")


def _parse_entry(name: str, fields: Any) -> tuple[str, Tenant]:
    check_name(name)
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: must be a mapping with `sha256`")
    rest = {key: value for key, value in fields.items() if key != "sha256"}
    digest = fields.get("sha256")
    if not (isinstance(digest, str) and _HASH.fullmatch(digest)):
        raise ConfigError(f"{name}: `sha256` must be 64 hexadecimal digits, in quotes if it has no letters")
    if "name" in rest:
        raise ConfigError(f"{name}: unknown field `name`")
    try:
        return digest, Tenant(name=name, **{str(key): value for key, value in rest.items()})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(["sha256", *(field for field in Tenant.model_fields if field != "name")])
            raise ConfigError(f"{name}: unknown field `{place}` (known: {known})") from None
        raise ConfigError(f"{name}: `{place}`: {first['msg']}" if place else f"{name}: {first['msg']}") from None


class _UniqueKeys(BoundedLoader):
    """Refuses a mapping with duplicate keys; plain YAML would use the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len({str(name) for name in names}) < len(names):
            raise yaml.constructor.ConstructorError(None, None, "a name is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
