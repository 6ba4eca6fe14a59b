"""Finds free ports for servers whose port must be known before they bind it."""

import random
import socket

from serve_app.errors import ConfigError

# Below the ports for outgoing connections (32768 and up on Linux), which could take a port between
# our check and the server's bind. Also below 30000, where Ray Serve's replicas listen.
_CANDIDATES = range(20_000, 30_000)


def free_port() -> int:
    """Return a free loopback port. Raises `OSError` if there is none."""
    for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"every port from {_CANDIDATES.start} to {_CANDIDATES.stop - 1} is taken")


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` if the server cannot listen on this address."""
    if not 1 <= port <= 65_535:  # 0 would let the kernel choose a port that clients cannot know
        raise ConfigError(f"http_options.port: {port} is not between 1 and 65535")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"http_options: cannot listen on {host}:{port}: {error.strerror}") from None
    except Exception as error:  # not a valid name
        raise ConfigError(f"http_options: cannot listen on {host}:{port}: {error}") from None
