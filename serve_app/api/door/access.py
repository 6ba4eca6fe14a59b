"""Access control from path and headers, before the body is read."""

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
"""The server's own launcher. No key in a keys file can have this name."""


class Access:
    """Checks API keys and origins.

    Without keys, all requests are `ANONYMOUS` and may use every route.
    """

    def __init__(
        self,
        keys: Callable[[], KeyRing] | None = None,
        *,
        allow_anonymous: bool = False,
        internal_key: str | None = None,
        origins: Origins | None = None,
        on_admin: Callable[[str, str], None] = lambda _key, _path: None,
    ) -> None:
        """keys: called at every request. allow_anonymous: serve requests without a key as
        `ANONYMOUS`.

        on_admin: called with the key's name and the path when an admin route is used.
        """
        self._on_admin = on_admin
        self._origins = origins or Origins()
        self._keys = keys
        self._allow_anonymous = allow_anonymous
        self._internal = None if internal_key is None else hash_key(internal_key)

    def tenant_of(self, scope: Scope) -> Tenant:
        """Return the request's tenant. Raises `AuthenticationError` and `PermissionDeniedError`.

        Every path not listed as public needs a key, even one that does not exist.
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
                "an API key is required: send the header `Authorization: Bearer <key>` or `x-api-key: <key>`"
            )
        if self._internal is not None and hmac.compare_digest(hash_key(key), self._internal):
            tenant = INTERNAL
        else:
            tenant = self._keys().find(key, datetime.now(UTC))
        if admin_only:
            if not tenant.admin:
                raise PermissionDeniedError("this endpoint requires an API key with `admin: true`")
            self._on_admin(tenant.name, path)
        return tenant


def path_of(scope: Scope) -> str:
    """Return the request's path without `root_path`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def key_of(headers: Headers) -> str:
    """Return the API key from OpenAI's header, else from Anthropic's; empty without one.

    Raises `AuthenticationError` if a header is given more than once with different values, since a
    proxy may have checked the other value.
    """
    scheme, _, key = _only(headers, "authorization").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return _only(headers, "x-api-key") if not scheme else scheme + key


def _only(headers: Headers, name: str) -> str:
    values = set(headers.getlist(name))
    if len(values) > 1:
        raise AuthenticationError(f"the header `{name}` is given more than once with different values")
    return values.pop() if values else ""
