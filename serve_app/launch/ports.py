"""Ports for servers that are told theirs before they bind it."""

import random
import socket

# Below those that the kernel gives to outgoing connections (32768 and up on Linux), one of which could take a port
# between our look at it and the server's bind; and below 30000, where Ray Serve's replicas listen.
_CANDIDATES = range(20_000, 30_000)


def free_port() -> int:
    """A loopback port that nobody listens on. Raises `OSError` where there is none."""
    for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"every port from {_CANDIDATES.start} to {_CANDIDATES.stop - 1} is taken")
