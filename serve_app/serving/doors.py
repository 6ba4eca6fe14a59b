"""Who may come in: `Access` from the settings, its keys kept fresh, and no open server on a network by accident."""

import asyncio
import ipaddress
import logging
from pathlib import Path

from serve_app.api.access import Access
from serve_app.errors import ConfigError
from serve_app.settings import IngressSettings, internal_key_file
from serve_app.tenants.key_file import WatchedKeyFile, read_key_file

logger = logging.getLogger(__name__)

_REFRESH_S = 1.0


def check_doors(ingress: IngressSettings, host: str) -> None:
    """Raise `ConfigError` if the keys file cannot be read, or if anybody could come from elsewhere untold.

    `host` is the address on which the server listens.
    """
    if ingress.keys_file is not None:
        read_key_file(Path(ingress.keys_file))
    elif not _is_loopback(host) and not ingress.allow_anonymous:
        raise ConfigError(
            f"setting `ingress.keys_file`: is needed where the server listens beyond this machine ({host}), "
            "or `ingress.allow_anonymous: true`"
        )


class Doors:
    """The ingress's `access`, of which `watch` keeps the keys as new as their file."""

    def __init__(self, ingress: IngressSettings, host: str) -> None:
        """Raises `ConfigError` as `check_doors` does."""
        check_doors(ingress, host)
        self._file = None if ingress.keys_file is None else WatchedKeyFile(Path(ingress.keys_file))
        if self._file is None:
            self.access = Access()
            if not _is_loopback(host):
                logger.warning("everybody who reaches %s may use this server: there is no `ingress.keys_file`", host)
            return
        internal = internal_key_file()
        file = self._file
        self.access = Access(
            lambda: file.ring,
            allow_anonymous=ingress.allow_anonymous,
            internal_key=None if internal is None else Path(internal).read_text(),
        )

    async def watch(self) -> None:
        """Until cancelled. In a thread, as the file may lie on a file system that has gone away."""
        while self._file is not None:
            await asyncio.sleep(_REFRESH_S)
            await asyncio.to_thread(self._file.refresh)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
