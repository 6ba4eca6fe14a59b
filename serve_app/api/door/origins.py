"""Requests that a browser sends for somebody else's page, which knows no key but reaches what the browser reaches."""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from serve_app.errors import PermissionDeniedError

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d+)?")


class Origins:
    """Which names the server answers to, and which pages may send to it besides its own."""

    def __init__(self, hosts: Sequence[str] | None = None, origins: Sequence[str] = ()) -> None:
        """`hosts` without ports, None for any: a name that leads here is how a page gets around the browser's rules.

        `origins` as browsers send them (`https://chat.example.org`).
        """
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower() for origin in origins)

    def check(self, headers: Headers) -> None:
        """Raise `PermissionDeniedError` for a request that no page of ours and no program meant for us has sent."""
        address = headers.get("host", "").lower()
        host = _HOST.fullmatch(address)
        if self._hosts is not None and (host is None or host[1] not in self._hosts):
            raise PermissionDeniedError(
                f"this server does not answer to the name {address[:100]!r} (setting `ingress.allowed_hosts`)",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins:
            return
        # The scheme may differ where a proxy ends TLS; a page of the same host and port is the console.
        if origin.partition("://")[2].lower() != address:
            raise PermissionDeniedError(
                f"pages of {origin[:100]!r} may not use this server (setting `ingress.allowed_origins`)",
                code="origin_not_allowed",
            )


def is_from_browser(headers: Headers) -> bool:
    """Whether a web page has caused the request: browsers say so, and no page can stop them."""
    return "origin" in headers or "sec-fetch-site" in headers
