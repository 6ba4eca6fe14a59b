"""Refuses requests that a browser sends for a page of another site.

Such a page has no key, but the browser may reach servers that the page's author cannot.
"""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from serve_app.errors import PermissionDeniedError

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d+)?")


class Origins:
    """The host names of this server, and the other origins whose pages may use it."""

    def __init__(self, hosts: Sequence[str] | None = None, origins: Sequence[str] = ()) -> None:
        """hosts: without ports; None allows any host name.

        This prevents DNS rebinding: a page's own host name that resolves to this server. origins:
        as browsers send them (`https://chat.example.org`).
        """
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)

    def check(self, headers: Headers) -> None:
        """Raise `PermissionDeniedError` if the host name or the page's origin is not allowed."""
        address = headers.get("host", "").lower()
        host = _HOST.fullmatch(address)
        if self._hosts is not None and (host is None or host[1] not in self._hosts):
            raise PermissionDeniedError(
                f"this server does not accept the host name {address[:100]!r} (setting `ingress.allowed_hosts`)",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins:
            return
        # The scheme may differ behind a proxy that ends TLS. A page of the same host and port is
        # the console.
        if origin.partition("://")[2].lower() != address:
            raise PermissionDeniedError(
                f"pages of {origin[:100]!r} are not allowed to use this server (setting `ingress.allowed_origins`)",
                code="origin_not_allowed",
            )


def is_from_browser(headers: Headers) -> bool:
    """Whether a web page caused the request.

    Browsers set these headers, and pages cannot remove them.
    """
    return "origin" in headers or "sec-fetch-site" in headers
