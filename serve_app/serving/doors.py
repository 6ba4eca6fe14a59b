"""Who may come in and use how much, from the settings; keys kept fresh, no open server on a network by accident."""

import asyncio
import hmac
import ipaddress
import itertools
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from serve_app.api.access import Access
from serve_app.api.origins import Origins
from serve_app.errors import ConfigError
from serve_app.observability.metrics_port import Admits
from serve_app.settings import IngressSettings, internal_key_file
from serve_app.tenants.accounts import Accounts
from serve_app.tenants.audit import AuditLog
from serve_app.tenants.key_file import WatchedKeyFile
from serve_app.tenants.keys import KeyRing, check_limits, hash_key
from serve_app.tenants.ledger import Ledger

logger = logging.getLogger(__name__)

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_REFRESH_S = 1.0
_SYNC_EVERY = 20
"""Looks at the keys file between two times that the ledger is put on the disk."""


def check_doors(ingress: IngressSettings, host: str) -> None:
    """Raise `ConfigError` if the keys file cannot be read, or if anybody could come from elsewhere untold.

    `host` is the address on which the server listens.
    """
    if ingress.keys_file is not None:
        _watch_keys(ingress, _ignore)
    elif not _is_loopback(host) and not ingress.allow_anonymous:
        raise ConfigError(
            f"setting `ingress.keys_file`: is needed where the server listens beyond this machine ({host}), "
            "or `ingress.allow_anonymous: true`"
        )


class Doors:
    """The ingress's `access` and `accounts`, of which `watch` keeps the keys as new as their file."""

    def __init__(self, ingress: IngressSettings, host: str) -> None:
        """Raises `ConfigError` as `check_doors` does, and where the ledger cannot be written."""
        check_doors(ingress, host)
        folder = None if ingress.ledger_folder is None else Path(ingress.ledger_folder)
        self._ledger = None if folder is None else Ledger(folder)
        audit = None if folder is None else AuditLog(folder)
        self.accounts = Accounts(self._ledger)
        origins = Origins(_hosts(ingress, host), ingress.allowed_origins)
        self.access = Access(origins=origins)
        self._file: WatchedKeyFile | None = None
        if ingress.keys_file is not None:
            self._file = file = _watch_keys(ingress, _ignore if audit is None else audit.keys_changed)
            internal = internal_key_file()
            self.access = Access(
                lambda: file.ring,
                allow_anonymous=ingress.allow_anonymous,
                internal_key=None if internal is None else Path(internal).read_text(),
                origins=origins,
                on_admin=_ignore if audit is None else audit.accessed,
            )
        elif not _is_loopback(host):
            logger.warning("everybody who reaches %s may use this server: there is no `ingress.keys_file`", host)

    def admits_to_metrics(self) -> Admits | None:
        """Who may see this process's metrics port: admins, or everybody without a keys file."""
        file = self._file
        return None if file is None else lambda key: file.ring.is_admin(key, datetime.now(UTC))

    async def watch(self) -> None:
        """Until cancelled. In a thread, as the files may lie on a file system that has gone away."""
        for look in itertools.count(1):
            await asyncio.sleep(_REFRESH_S)
            if self._file is not None:
                await asyncio.to_thread(self._file.refresh)
            if self._ledger is not None and look % _SYNC_EVERY == 0:
                await asyncio.to_thread(self._ledger.sync)


def admits_to_replicas_metrics(ingress: IngressSettings, own_key: str) -> Admits | None:
    """Who may see an engine replica's metrics port: admins, and who has its `own_key`; everybody without a keys file.

    A replica without the file serves all the same, but its metrics to the ingress alone.
    """
    if ingress.keys_file is None:
        return None
    file, own = WatchedKeyFile(Path(ingress.keys_file), ring=KeyRing({})), hash_key(own_key)

    def admits(key: str) -> bool:
        if hmac.compare_digest(hash_key(key), own):
            return True
        file.refresh()
        return file.ring.is_admin(key, datetime.now(UTC))

    return admits


def _watch_keys(ingress: IngressSettings, on_change: Callable[[str], None]) -> WatchedKeyFile:
    def check(ring: KeyRing) -> None:
        check_limits(ring, has_ledger=ingress.ledger_folder is not None)

    assert ingress.keys_file is not None
    return WatchedKeyFile(Path(ingress.keys_file), check, on_change)


def _ignore(*_: str) -> None:
    """Where no audit log is kept."""


def _hosts(ingress: IngressSettings, host: str) -> Sequence[str] | None:
    if ingress.allowed_hosts is not None or not _is_loopback(host):
        return ingress.allowed_hosts
    return (*_LOOPBACK_NAMES, host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
