"""Access control and usage accounting of the ingress.

Reloads the keys file, and refuses to listen on a network without keys unless the settings allow it.
"""

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
"""The ledger is synced to disk once per this many refreshes."""


def check_auth(ingress: IngressSettings, host: str) -> None:
    """Raise `ConfigError` if the keys file or ledger is unusable, or the server would be open.

    Open means: reachable from other machines without a keys file and without `allow_anonymous`.
    `host` is the address that the server listens on.
    """
    _check_open(ingress, host)
    if ingress.keys_file is not None:
        read_key_file(Path(ingress.keys_file), _check_keys(ingress))
    if ingress.ledger_folder is not None:
        Ledger(Path(ingress.ledger_folder)).close()


class Auth:
    """The ingress's `access` and `accounts`.

    The tasks of `start` keep both up to date with their files. An unusable file does not prevent
    the ingress from starting: the ingress that it replaces may be dead.
    """

    def __init__(self, ingress: IngressSettings, host: str) -> None:
        """Raises `ConfigError` if the server would be open, as `check_auth` does."""
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
        """Return the check for this process's metrics port: admin keys only.

        None without a keys file.
        """
        file = self._file
        return None if file is None else lambda key: file.ring.is_admin(key, datetime.now(UTC))

    @property
    def keys_file_invalid(self) -> bool:
        """Whether the last read of the keys file failed."""
        return self._file is not None and self._file.error is not None

    @property
    def ledger_unusable(self) -> bool:
        """Whether the last access to today's ledger file failed. Usage then stays in memory."""
        return self._ledger is not None and self._ledger.error is not None

    def check_ready(self) -> None:
        """Raise `UnavailableError` if no key can be checked or today's ledger is not open."""
        ring = None if self._file is None else self._file.ring  # read once: threads replace it
        if isinstance(ring, UnknownKeys):
            raise ring.error()
        if self._ledger is not None and not self._ledger.is_open:
            raise UnavailableError("today's file in `ingress.ledger_folder` cannot be opened; see the server's log")

    def start(self, tasks: LastingTasks) -> None:
        """Start the tasks that refresh the keys file and the ledger."""
        if self._file is not None:
            tasks.start("keys file", self._watch_keys)
        if self._ledger is not None:
            tasks.start("ledger", self._keep_ledger)

    async def _watch_keys(self) -> None:
        """Refresh the keys file in its own thread, because the file system may hang."""
        assert self._file is not None
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "keys")
        while True:
            await asyncio.sleep(_REFRESH_S)
            await loop.run_in_executor(thread, self._file.refresh)

    async def _keep_ledger(self) -> None:
        """Refresh the ledger in its own thread, because the file system may hang."""
        assert self._ledger is not None
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "ledger")
        for look in itertools.count(1):
            await asyncio.sleep(_REFRESH_S)
            await loop.run_in_executor(thread, self._ledger.look)
            self._ledger.catch_up()
            if look % _SYNC_EVERY == 0:
                await loop.run_in_executor(thread, self._ledger.sync)


def admits_to_replicas_metrics(ingress: IngressSettings, own_key: str) -> Admits | None:
    """Return the check for an engine replica's metrics port.

    It admits admin keys and the replica's `own_key`. None without a keys file. If the replica
    cannot read the file, it still serves, but only the ingress can read its metrics.
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
    """Watch the keys file from its current state. Until it can be read, all keys are unknown."""
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
