"""Who may come in and use how much, from the settings; keys kept fresh, no open server on a network by accident."""

import asyncio
import hmac
import ipaddress
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from serve_app.api.door.access import Access
from serve_app.api.door.origins import Origins
from serve_app.environment import internal_key_file
from serve_app.errors import ConfigError, UnavailableError
from serve_app.observability.logging import AdminLines
from serve_app.observability.metrics_port import Admits
from serve_app.settings import IngressSettings
from serve_app.system.lasting import LastingTasks
from serve_app.tenants.accounts import Accounts
from serve_app.tenants.key_file import WatchedKeyFile, read_key_file
from serve_app.tenants.keys import KeyRing, UnknownKeys, check_limits, hash_key
from serve_app.tenants.ledger import Ledger

logger = logging.getLogger(__name__)

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_REFRESH_S = 1.0
_SYNC_EVERY = 20
"""Looks at the ledger between two times that it is put on the disk."""


def check_auth(ingress: IngressSettings, host: str) -> None:
    """Raise `ConfigError` if keys file or ledger cannot be used, or if anybody could come from elsewhere untold.

    `host` is the address on which the server listens.
    """
    _check_open(ingress, host)
    if ingress.keys_file is not None:
        read_key_file(Path(ingress.keys_file), _check_keys(ingress))
    if ingress.ledger_folder is not None:
        Ledger(Path(ingress.ledger_folder)).close()


class Auth:
    """The ingress's `access` and `accounts`, which the tasks of `start` keep as new as their files.

    A file that cannot be used keeps no ingress from starting: the one that it replaces may be dead.
    """

    def __init__(self, ingress: IngressSettings, host: str) -> None:
        """Raises `ConfigError` if anybody could come from elsewhere untold."""
        _check_open(ingress, host)
        folder = None if ingress.ledger_folder is None else Path(ingress.ledger_folder)
        self._ledger = None if folder is None else Ledger(folder, must_open=False)
        self.accounts = Accounts(self._ledger)
        origins = Origins(_hosts(ingress, host), ingress.allowed_origins)
        self.access = Access(origins=origins)
        self._file: WatchedKeyFile | None = None
        if ingress.keys_file is not None:
            self._file = file = _watch_keys(ingress)
            internal = internal_key_file()
            self.access = Access(
                lambda: file.ring,
                allow_anonymous=ingress.allow_anonymous,
                internal_key=None if internal is None else Path(internal).read_text(),
                origins=origins,
                on_admin=AdminLines(),
            )
        elif not _is_loopback(host):
            logger.warning("any client that reaches %s may use this server: `ingress.keys_file` is not set", host)

    def admits_to_metrics(self) -> Admits | None:
        """Who may see this process's metrics port: admins, or everybody without a keys file."""
        file = self._file
        return None if file is None else lambda key: file.ring.is_admin(key, datetime.now(UTC))

    @property
    def keys_file_invalid(self) -> bool:
        """Whether the keys file could not be read the last time."""
        return self._file is not None and self._file.error is not None

    @property
    def ledger_unusable(self) -> bool:
        """Whether today's file could not be used the last time; its sums are in memory."""
        return self._ledger is not None and self._ledger.error is not None

    def check_ready(self) -> None:
        """Raise `UnavailableError` while no key can be checked, or no use of today can be read or written."""
        ring = None if self._file is None else self._file.ring  # once: another thread replaces it
        if isinstance(ring, UnknownKeys):
            raise ring.error()
        if self._ledger is not None and not self._ledger.is_open:
            raise UnavailableError("today's file in `ingress.ledger_folder` cannot be opened; the log says why")

    def start(self, tasks: LastingTasks) -> None:
        """Look after the files from now on."""
        if self._file is not None:
            tasks.start("keys file", self._watch_keys)
        if self._ledger is not None:
            tasks.start("ledger", self._keep_ledger)

    async def _watch_keys(self) -> None:
        """In a thread of its own, as the file may lie on a file system that has gone away."""
        assert self._file is not None
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "keys")
        while True:
            await asyncio.sleep(_REFRESH_S)
            await loop.run_in_executor(thread, self._file.refresh)

    async def _keep_ledger(self) -> None:
        """In a thread of its own, for the same reason."""
        assert self._ledger is not None
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "ledger")
        for look in itertools.count(1):
            await asyncio.sleep(_REFRESH_S)
            await loop.run_in_executor(thread, self._ledger.look)
            self._ledger.catch_up()
            if look % _SYNC_EVERY == 0:
                await loop.run_in_executor(thread, self._ledger.sync)


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


def _watch_keys(ingress: IngressSettings) -> WatchedKeyFile:
    """From its state now on; while that cannot be read, no key is known."""
    assert ingress.keys_file is not None
    path, check = Path(ingress.keys_file), _check_keys(ingress)
    try:
        return WatchedKeyFile(path, check)
    except ConfigError:
        file = WatchedKeyFile(path, check, ring=UnknownKeys())
        file.refresh()
        return file


def _check_keys(ingress: IngressSettings) -> Callable[[KeyRing], None]:
    return partial(check_limits, has_ledger=ingress.ledger_folder is not None)


def _check_open(ingress: IngressSettings, host: str) -> None:
    if ingress.keys_file is None and not _is_loopback(host) and not ingress.allow_anonymous:
        raise ConfigError(
            f"setting `ingress.keys_file`: required because the server listens beyond this machine ({host}); "
            "or set `ingress.allow_anonymous: true`"
        )


def _hosts(ingress: IngressSettings, host: str) -> Sequence[str] | None:
    if ingress.allowed_hosts is not None or not _is_loopback(host):
        return ingress.allowed_hosts
    return (*_LOOPBACK_NAMES, host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
