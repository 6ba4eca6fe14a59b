"""Whose a request is, and whether it may come in: decided from its path and headers, before its body is read."""

import hmac
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.door.origins import Origins
from serve_app.errors import AuthenticationError, PermissionDeniedError
from serve_app.tenants.keys import KeyRing, hash_key
from serve_app.tenants.tenant import ANONYMOUS, Tenant

HEALTH = ("/health", "/health/live", "/health/ready", "/ping")
_PUBLIC = ("/", "/docs", *HEALTH)
_PUBLIC_FILES = "/console/"
_ADMIN = ("/metrics", "/debug")

INTERNAL = Tenant(name="(internal)")
"""The server's own launcher. No key in a file can have this name."""


class Access:
    """Knows the keys, and whose pages may send. Without keys, everybody is `ANONYMOUS` and may do everything."""

    def __init__(
        self,
        keys: Callable[[], KeyRing] | None = None,
        *,
        allow_anonymous: bool = False,
        internal_key: str | None = None,
        origins: Origins | None = None,
        on_admin: Callable[[str, str], None] = lambda _key, _path: None,
    ) -> None:
        """`keys` is asked at every request. `allow_anonymous`: who sends no key is served, as nobody in particular.

        `on_admin` is told the key's name and the path when a route is used that is for admins.
        """
        self._on_admin = on_admin
        self._origins = origins or Origins()
        self._keys = keys
        self._allow_anonymous = allow_anonymous
        self._internal = None if internal_key is None else hash_key(internal_key)

    def tenant_of(self, scope: Scope) -> Tenant:
        """Whose the request is. Raises `AuthenticationError` and `PermissionDeniedError`.

        Whatever is not known to be public needs a key, routes that do not exist included.
        """
        path, headers = path_of(scope), Headers(scope=scope)
        if path not in HEALTH:
            self._origins.check(headers)
        if self._keys is None or scope["method"] == "OPTIONS" or path in _PUBLIC or path.startswith(_PUBLIC_FILES):
            return ANONYMOUS
        key = key_of(headers)
        admin_only = any(path == root or path.startswith(root + "/") for root in _ADMIN)
        if not key:
            if self._allow_anonymous and not admin_only:
                return ANONYMOUS
            raise AuthenticationError(
                "this needs an API key: send the header `Authorization: Bearer <key>` or `x-api-key: <key>`"
            )
        if self._internal is not None and hmac.compare_digest(hash_key(key), self._internal):
            tenant = INTERNAL
        else:
            tenant = self._keys().find(key, datetime.now(UTC))
        if admin_only:
            if not tenant.admin:
                raise PermissionDeniedError("this tells of everybody: it needs a key with `admin: true`")
            self._on_admin(tenant.name, path)
        return tenant


def path_of(scope: Scope) -> str:
    """The request's path as this application's routes have it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def key_of(headers: Headers) -> str:
    """The request's API key, as OpenAI's clients send it or, without that, as Anthropic's do; empty without one.

    Raises `AuthenticationError` where one header says two things, of which a proxy may have read the other.
    """
    scheme, _, key = _only(headers, "authorization").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return _only(headers, "x-api-key") if not scheme else scheme + key


def _only(headers: Headers, name: str) -> str:
    values = set(headers.getlist(name))
    if len(values) > 1:
        raise AuthenticationError(f"the header `{name}` stands there more than once, with different keys")
    return values.pop() if values else ""
