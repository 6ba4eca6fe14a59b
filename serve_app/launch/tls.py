"""TLS on the fast path, terminated by HAProxy. Reloads certificate and key when they change.

HAProxy uses a copy of both in one file. Only a valid pair replaces the copy, because Ray may reload
HAProxy at any time. A running HAProxy gets the new pair over its socket: existing streams continue,
and new connections get the new certificate.
"""

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.launch.haproxy_config import PEM
from serve_app.system.file_state import FileState, file_state
from serve_app.system.operator_files import read_text

HAPROXY_SOCKET = "admin.sock"

_TIMEOUT_S = 5.0

_State = tuple[FileState | None, ...]


@dataclass(frozen=True)
class KeyPair:
    """The files of a certificate chain and its key."""

    certificate: Path
    key: Path


class WatchedKeyPair:
    """Keeps HAProxy's copy up to date with the files."""

    def __init__(self, files: KeyPair, folder: Path) -> None:
        """Raises `ConfigError` with one line if the files cannot be used."""
        self._files = files
        self._folder = folder
        self._seen = self._done = self._state()
        self._failure: str | None = None
        self._install()

    def look(self) -> str | None:
        """Install a changed pair. Returns a line to print, or None. Call this frequently.

        Acts on the second call after a change, because certificate and key are replaced one after
        the other. If HAProxy does not take the pair, each call tries again, and each reason is
        returned once.
        """
        state, before = self._state(), self._seen
        self._seen = state
        if state == self._done or state != before:
            return None
        try:
            self._update_haproxy(self._install())
        except ConfigError as error:
            failure = str(error)
            self._done = state
        except OSError as error:
            failure = str(error)
            if failure == self._failure:
                return None
        else:
            self._done, self._failure = state, None
            return f"{self._files.certificate} was read again: new connections get it"
        self._failure = failure
        return f"{failure}; the previous certificate stays in use"

    def _state(self) -> _State:
        return tuple(file_state(path) for path in (self._files.certificate, self._files.key))

    def _install(self) -> str:
        """Copy the pair for the next HAProxy that starts. Returns the PEM. Raises `ConfigError`."""
        try:
            text = "\n".join(read_text(path) for path in (self._files.certificate, self._files.key))
        except ConfigError as error:
            raise self._unusable(error) from None
        # HAProxy's socket treats an empty line as the end of input.
        pem = "".join(f"{line}\n" for line in text.splitlines() if line.strip())
        candidate = self._folder / f"{PEM}.new"
        candidate.touch(0o600)
        candidate.write_text(pem)
        try:
            # Without a password argument, OpenSSL would prompt for one on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(candidate, password="")
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        os.replace(candidate, self._folder / PEM)
        return pem

    def _unusable(self, error: Exception) -> ConfigError:
        reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
        named = f"{self._files.certificate} and {self._files.key}"
        return ConfigError(f"http_options: certificate and key ({named}) cannot be used: {reason or error}")

    def _update_haproxy(self, pem: str) -> None:
        """Install the certificate in every running HAProxy. Raises `OSError`."""
        path = self._folder / PEM
        # Ray creates the socket in a subfolder.
        sockets = list(self._folder.rglob(HAPROXY_SOCKET))
        if not sockets:
            raise OSError("HAProxy does not run")
        for address in sockets:
            self._command(address, f"set ssl cert {path} <<\n{pem}\n", "Transaction ")
            self._command(address, f"commit ssl cert {path}\n", "Success")

    @staticmethod
    def _command(address: Path, text: str, expected: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(address))
            connection.sendall(text.encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        if expected not in answer:
            raise OSError(f"HAProxy refused the certificate: {' '.join(answer.split())}")
