"""Handshake of a link: both ends send their version, and prove that they know the replica's key.

    ingress: serve-app-link/2 NONCE
    replica: serve-app-link/2 NONCE PROOF
    ingress: serve-app-link/2 PROOF

A proof is an HMAC with the key over the prover's role and both nonces. So the key is never sent,
and recorded traffic opens no other connection. Nothing after the handshake is signed or encrypted:
an attacker who can modify traffic can still add to it. We also send our version to an end with
another version, so that both can report the mismatch.

Pure: bytes in, bytes out.
"""

import hmac
import re
import secrets
from collections.abc import Generator

VERSION = 2
"""Version of the link protocol. Increase it with every change that older ends would not understand.
"""

_NAME = b"serve-app-link/"
_HELLO = re.compile(rb"serve-app-link/(\d{1,9})((?: \w+)*)")
_NONCE_BYTES = 16
_MAX_LINE_BYTES = 256

_Steps = Generator[bytes, bytes, tuple[bytes, bytes]]
"""Yields bytes to send and is sent the bytes received.

Returns the last bytes to send, and the bytes received after the handshake.
"""


class HandshakeError(Exception):
    """The other end does not speak our protocol.

    The message is a predicate that says why. `answer`: bytes to send, with the version that we
    understand.
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class Handshake:
    """One end. Send `opening`, then what `receive` returns, until `rest` is set."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self.opening = next(steps)
        self.rest: bytes | None = None
        """The bytes received after the handshake; None before its end."""

    @classmethod
    def of_ingress(cls, key: str) -> "Handshake":
        """Return the handshake of the end that connects."""
        return cls(_meet_replica(key))

    @classmethod
    def of_replica(cls, key: str) -> "Handshake":
        """Return the handshake of the end that accepts the connection."""
        return cls(_meet_ingress(key))

    def receive(self, data: bytes) -> bytes:
        """Return the bytes to answer. Raises `HandshakeError`."""
        try:
            return self._steps.send(data)
        except StopIteration as end:
            answer, self.rest = end.value
            return bytes(answer)


def _meet_replica(key: str) -> _Steps:
    ours = _nonce()
    (theirs, proof), rest = yield from _exchange(_hello(ours), b"", words=2)
    _check(proof, key, b"replica", ours, theirs)
    return _hello(_prove(key, b"ingress", ours, theirs)), rest


def _meet_ingress(key: str) -> _Steps:
    ours = _nonce()
    (theirs,), rest = yield from _exchange(b"", b"", words=1)
    (proof,), rest = yield from _exchange(_hello(ours, _prove(key, b"replica", theirs, ours)), rest, words=1)
    _check(proof, key, b"ingress", theirs, ours)
    return b"", rest


def _exchange(said: bytes, heard: bytes, words: int) -> Generator[bytes, bytes, tuple[list[bytes], bytes]]:
    """Send `said`, then receive a line of `words` words.

    Returns the words and the bytes after the line.
    """
    while b"\n" not in heard:
        if not heard.startswith(_NAME[: len(heard)]) or len(heard) > _MAX_LINE_BYTES:
            break
        heard += yield said
        said = b""
    line, _, rest = heard.partition(b"\n")
    hello = _HELLO.fullmatch(line)
    if hello is not None and (version := int(hello[1])) != VERSION:
        raise HandshakeError(f"uses version {version} of the link protocol, this end uses version {VERSION}", _hello())
    if hello is None or len(received := hello[2].split()) != words:
        raise HandshakeError("does not use the link protocol")
    return received, rest


def _hello(*words: bytes) -> bytes:
    return b" ".join((_NAME + str(VERSION).encode(), *words)) + b"\n"


def _nonce() -> bytes:
    return secrets.token_hex(_NONCE_BYTES).encode()


def _prove(key: str, who: bytes, ingress_nonce: bytes, replica_nonce: bytes) -> bytes:
    message = b" ".join((_NAME, who, ingress_nonce, replica_nonce))
    return hmac.new(key.encode(), message, "sha256").hexdigest().encode()


def _check(proof: bytes, key: str, who: bytes, ingress_nonce: bytes, replica_nonce: bytes) -> None:
    if not hmac.compare_digest(proof, _prove(key, who, ingress_nonce, replica_nonce)):
        raise HandshakeError("does not have the link's key")
