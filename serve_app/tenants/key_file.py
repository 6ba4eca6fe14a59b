"""Reads, watches and changes the keys file. `keys` parses its content."""

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from serve_app.errors import ConfigError
from serve_app.system.file_state import file_state
from serve_app.system.operator_files import read_text, typed_errors
from serve_app.tenants.keys import KeyRing, UnknownKeys, check_name, hash_key, new_key, parse_keys

logger = logging.getLogger(__name__)

_REMINDER_S = 30.0
_HEADER = "# API keys of serve_app: names with their fields. Only a key's hash is stored.\n"


Check = Callable[[KeyRing], None]
"""Raises `ConfigError` if the server does not support what the keys require."""


def read_key_file(path: Path, check: Check = lambda _: None) -> KeyRing:
    """Read a keys file. Raises `ConfigError` in one line that names the file."""
    return _parse(path, _read(path), check)


class WatchedKeyFile:
    """The newest valid key ring of a file. `refresh` is thread-safe."""

    def __init__(
        self,
        path: Path,
        check: Check = lambda _: None,
        ring: KeyRing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ring: used until the file is read for the first time. clock: in seconds.

        Raises `ConfigError` if there is no valid key ring to start with.
        """
        self._path = path
        self._check = check
        self._clock = clock
        self._next_reminder = 0.0
        self._refreshing = threading.Lock()
        self._invalid = ("", "")
        """The latest invalid text and its error, to avoid parsing it again."""
        self._seen = file_state(path) if ring is None else None
        self.ring = read_key_file(path, check) if ring is None else ring
        self.error: str | None = None
        """Error of the last read; None if it succeeded."""

    def refresh(self) -> None:
        """Read the file if it has changed or was unreadable. May block.

        After an error the last valid keys remain. An error is logged at once, and every 30 s while
        it lasts.
        """
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        state = file_state(self._path)
        if state == self._seen and self.error is None:
            return
        self._seen = state
        try:
            ring = self._read()
        except ConfigError as error:
            self._complain(str(error))
            return
        self.error = None
        before, after = ({tenant.name: tenant for tenant in keys.tenants} for keys in (self.ring, ring))
        self.ring = ring
        news = {
            "added": after.keys() - before.keys(),
            "removed": before.keys() - after.keys(),
            "changed": {name for name in before.keys() & after.keys() if before[name] != after[name]},
        }
        changes = "; ".join(f"{kind} {', '.join(sorted(names))}" for kind, names in news.items() if names)
        changes = changes or "the same names and limits"
        logger.info("keys file %s was reloaded: %s", self._path, changes)

    def _read(self) -> KeyRing:
        """Read the file. Raises `ConfigError`."""
        text = _read(self._path)
        if text and text == self._invalid[0]:
            raise ConfigError(self._invalid[1])
        try:
            return _parse(self._path, text, self._check)
        except ConfigError as error:
            self._invalid = text, str(error)
            raise

    def _complain(self, error: str) -> None:
        now = self._clock()
        if error != self.error or now >= self._next_reminder:
            self._next_reminder = now + _REMINDER_S
            unknown = isinstance(self.ring, UnknownKeys)
            meanwhile = "every API key is answered 503" if unknown else "the last valid keys stay in force"
            logger.error("%s; %s", error, meanwhile)
        self.error = error


def add_key(path: Path, name: str, fields: dict[str, Any]) -> str:
    """Create a key for `name`, add it to the file and return it. Creates the file if needed.

    Raises `ConfigError`.
    """
    check_name(name)
    with typed_errors(f"keys file {path}: "):
        text = _read(path) if path.exists() else _HEADER
    if any(tenant.name == name for tenant in _parse(path, text).tenants):
        raise ConfigError(f"{path}: a key named {name} exists; revoke it or choose another name")
    key = new_key()
    entry = yaml.safe_dump({name: {"sha256": hash_key(key), **fields}}, sort_keys=False)
    _write(path, re.sub(r"(?m)^\{\}\s*\Z", "", text).rstrip("\n") + "\n\n" + entry)
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove the entry `name` from the file and leave the rest unchanged. Raises `ConfigError`."""
    text = _read(path)
    names = [tenant.name for tenant in _parse(path, text).tenants]
    if name not in names:
        raise ConfigError(f"{path}: no key is named {name[:100]!r}")
    # From the entry's line to the next line that is neither indented nor empty.
    entry = re.compile(rf"""(?m)^['"]?{re.escape(name)}['"]?[ ]*:.*\n?(?:[ \t]+.*\n?|\n)*""")
    rest = entry.sub("", text, count=1)
    try:
        as_meant = [tenant.name for tenant in parse_keys(rest).tenants] == [other for other in names if other != name]
    except ConfigError:
        as_meant = False
    if not as_meant:
        raise ConfigError(f"{path}: remove {name} by hand; the file was not written by `serve-app keys`")
    _write(path, rest)


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except ConfigError as error:
        raise ConfigError(f"keys file {path}: {error}") from None


def _parse(path: Path, text: str, check: Check = lambda _: None) -> KeyRing:
    try:
        with typed_errors(show_text=False):
            ring = parse_keys(text)
            check(ring)
    except ConfigError as error:
        raise ConfigError(f"keys file {path}: {error}") from None
    return ring


def _write(path: Path, text: str) -> None:
    """Write atomically, so that a server never reads part of a file.

    A new file is readable only by its owner.
    """
    _parse(path, text)
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, mode)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror}") from None
